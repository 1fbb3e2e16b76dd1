"""What measures a real engine: its speed, its accuracy, the cost of its steps."""
