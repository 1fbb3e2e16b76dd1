"""Text that keeps to a grammar: JSON schemas, regular expressions, Lark grammars, choices."""
