"""Text forms of the words: reading with every problem reported at once, and writing."""
