"""Texts in which tokenizers differ: scripts, digits, runs of spaces, code, special tokens."""

from __future__ import annotations

import random

_WRITTEN = [
    "",
    " ",
    "  ",
    "a",
    " a",
    "  a",
    "a ",
    "a  ",
    "\n",
    "\n\n",
    "\n\n\n x",
    "\t\tx",
    " \n \n",
    "\r\n\r\nx\r",
    "x\u00a0y\u2003z\u3000w",
    "Hello, world!",
    "The capital of France is",
    "I'm you're he'll they'd we've it's DON'T I'M ’s ’t",
    "Don't won't 'quoted' \"double\" `code`",
    "1",
    "12",
    "1234567890",
    "   1",
    "  12  345   6789",
    "3.14159 -2,718.28 1e-9 0xDEADBEEF 1_000_000",
    "٣٤٥ १२३ Ⅷ ½ ²³ ①②",
    "2024-02-29T23:59:60Z +49 (0)30 123-456",
    "def f(x: int) -> int:\n    return x ** 2  # square\n",
    "for (int i = 0; i < n; ++i) {\n\t\ta[i] += b[i] << 3;\n}\n",
    "SELECT * FROM t WHERE a <> 'b' AND c >= 10;",
    '{"key": [1, 2.5, null, true], "s": "a\\nb"}',
    "<html><body><h1>Title</h1><table><tr><td>1</td></tr></table></body></html>",
    "$$\\int_0^\\infty e^{-x^2}\\,dx = \\frac{\\sqrt{\\pi}}{2}$$",
    "https://example.org/a/b?c=d&e=f#g user@example.org",
    "naïve café résumé Zoë Ångström straße ŒUVRE",
    "cafe\u0301 e\u0301 A\u030a",
    "Привет, как дела? Ёлка",
    "Γειά σου Κόσμε",
    "שלום עולם",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "你好，世界！今天天气很好。",
    "日本語のテキストとカタカナ、ひらがな。",
    "안녕하세요 세계",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝒜𝒷𝒸 𐍈 𓀀",
    "😀😃👩‍👩‍👧‍👦🏳️‍🌈👍🏽🇩🇪🪿🫨",
    "a😀b 🙂 c",
    "\u200b\u200d\ufeff\u00ad",
    "\x00\x01\x1f\x7f\x80",
    "\ufffd\ufffe\uffff",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "----------========**********__________..........!!!!!!!!!!",
    "ⅻ ǅ ﬁ ﬀ ß İ ı",
    "<0x41> <0xFF> ▁▁ ▁x Ġhello Ċ",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "HTTPServer XMLHttpRequest camelCase snake_case kebab-case SCREAMING_CASE",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|>x<|endoftext|>",
    "<|im_start|><|im_end|><|im_start|",
    "text<|im_end|>text <|im_end|> text",
    "<repo_name>a/b<file_sep>c.py\nprint(1)",
    "<bos>Hello<eos>",
    "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
    "<unused42> <pad><unk><mask> [multimodal]",
    "x<start_of_image>y",
    *(f"{' ' * count}x{' ' * count}" for count in range(1, 40)),
    *(f"a{' ' * count}1" for count in range(1, 8)),
    *(f"{chr(10) * count}x" for count in range(1, 34, 3)),
    *(f"{chr(9) * count}x" for count in range(1, 34, 5)),
]

_ALPHABETS = [
    "abcdefghijklmnopqrstuvwxyz     ",
    "ABCabc  .,;:!?'\"-()[]{}\n\t",
    "0123456789 .,-+",
    "if else return def class = == ( ) : \n    self . _ 0 1 ",
    "éèüößñçøåæłžšđ aeiou ",
    "абвгдежзийклмн опрст уфхцчшщ",
    "的一是不了人我在有他这中大来上国和说们为子",
    "あいうえおカキクケコ日本語漢字ー。、",
    "가나다라마바사아자차카타파하 한국어",
    "😀😂🥰👍🏽🇫🇷🧑‍🚀❤️✨ ",
    "ابتثجحخدذرزسشصضطظعغفقكلمنهوي ",
    "▁Ġ<0x>|im_end\u00a0\u200b\u3000 \r\n",
]


def sample_texts() -> list[str]:
    """The texts, the same every time."""
    rng = random.Random(20)
    drawn = [
        "".join(rng.choices(alphabet, k=rng.randint(1, 40)))
        for alphabet in _ALPHABETS
        for _ in range(12)
    ]
    mixed = ["".join(rng.sample(_WRITTEN + drawn, 3)) for _ in range(60)]
    anything = ["".join(chr(_scalar(rng)) for _ in range(rng.randint(1, 12))) for _ in range(60)]
    return _WRITTEN + drawn + mixed + anything


def _scalar(rng: random.Random) -> int:
    """A Unicode scalar value, low ones more often."""
    value = rng.randrange(1 << rng.randint(5, 20))
    return value if not 0xD800 <= value <= 0xDFFF else 0x20
