"""Text of about 100 kB on which two tokenizers are compared: scripts, code, emoji and controls.

The text is generated, and is the same on every machine. It contains no special token. All
characters were in Unicode before 2011, so packages with different versions of Unicode agree on
them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

Encode = Callable[[Sequence[str]], Sequence[Sequence[int]]]
"""Returns the tokens of each text."""

# Ranges of code points and the sampling step: every letter of alphabets, a sample of the large
# sets.
_BLOCKS = (
    (0x0000, 0x0180, 1),  # ASCII, controls, Latin
    (0x0180, 0x0250, 2),
    (0x0250, 0x0370, 3),  # phonetic, modifiers, combining marks
    (0x0370, 0x0530, 1),  # Greek, Cyrillic
    (0x0531, 0x0700, 2),  # Armenian, Hebrew, Arabic
    (0x0700, 0x1100, 3),  # Syriac to Georgian, including the scripts of India
    (0x1100, 0x1200, 7),  # Hangul's letters
    (0x1200, 0x1D00, 5),  # Ethiopic, Cherokee, Khmer, Mongolian
    (0x1D00, 0x1F00, 3),
    (0x1F00, 0x2100, 1),  # Greek with accents, punctuation, superscript digits
    (0x2100, 0x2C00, 5),  # letterlike, numbers, arrows, mathematics, boxes, dingbats
    (0x2C00, 0x3000, 5),  # Glagolitic, Coptic, Tifinagh, radicals
    (0x3000, 0x3100, 1),  # Hiragana, Katakana
    (0x3100, 0x3400, 5),
    (0x3400, 0x9FC0, 53),  # Han
    (0xA000, 0xA960, 29),
    (0xAC00, 0xD7A4, 61),  # Hangul
    (0xE000, 0xF900, 499),  # private use
    (0xF900, 0xFB00, 7),
    (0xFB00, 0xFFF0, 5),  # presentation forms, wide and narrow forms
    (0x10000, 0x10100, 7),
    (0x10300, 0x10450, 3),  # Gothic, Deseret, with upper and lower case
    (0x12000, 0x12300, 61),
    (0x1D100, 0x1D800, 11),  # music, mathematical letters
    (0x1F300, 0x1F320, 1),  # emoji
    (0x1F400, 0x1F43F, 1),
    (0x1F600, 0x1F641, 1),
    (0x1F680, 0x1F6C5, 1),
    (0x20000, 0x2A6D7, 499),
    (0xE0020, 0xE0080, 9),
)
_CHARACTERS_PER_TEXT = 24
"""Number of characters in one text."""

_FIXED_TEXTS = (
    "",
    " ",
    "\n",
    "\t",
    "The quick brown fox JUMPS over the Lazy dog. It's, I'LL, we'Ve, they'd; 'tis. NASA's iPhone.",
    "  two  spaces   three    four     then\ttabs\t\tand\n\nlines\r\nof\rall \n \u00a0\u3000 x ",
    "\ufeffmark \u200b\u200c\u200d\u2060 \u2028\u2029\x85 \u202eright to left\u202c",
    "Cafe\u0301 caf\u00e9 CAF\u00c9 \u00c5ngstr\u00f6m A\u030angstro\u0308m na\u00efve Stra\u00dfe "
    "STRASSE \ufb01n \u0130stanbul \u0131 \u017f",
    "1234567890 3.14159 1,000,000 0x1F 1e-9 \u00bd \u00b2 \u0663 \u2167 \uff11\uff12 50% $9.99",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8\u3002\uff21\uff22 \uff76\uff9e "
    "\u4e2d\u6587\u3002 \ud55c\uad6d\uc5b4 \u1112\u1161\u11ab",
    "\u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd \u0645\u0631\u062d\u0628\u064b\u0627 "
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e01\u0e33 \u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001f469\u200d\U0001f4bb \U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd \u2764\ufe0f "
    "1\ufe0f\u20e3 \U0001f600\U0001f600",
    "\x00\x01\x02 \x07\x08 \x1b[31mred\x1b[0m \x7f \x80\x9f",
    "!!! ??? ... --- *** ### @@@ &&& ((())) [[[]]] {{{}}} <<<>>> |||\\\\\\ ~~~ ``` '''\"\" ,,, ;",
    "<b>bold</b> &amp; <!-- no --> </p> <x> [INST] [PAD] [X] {0} ${name} %s %d \\n \\u0041 \\x41",
    "https://example.com/a/b?c=d&e=f#g mail@example.com C:\\Users\\x /usr/lib #tag @name v1.2.3",
    "snake_case camelCase PascalCase SCREAMING_CASE kebab-case __dunder__ $dollar a1b2c3 x86_64",
    "_\u2581_ \u2581word\u2581 \u0120word \u010a #word ##word word## word</w> @@ \u2047",
    " " * 70,
    "\n" * 40 + "x",
    "a" * 300,
    "ab1!" * 50,
    "=" * 80,
)
_CODE = """\
def fibonacci(n: int) -> list[int]:
    \"\"\"Return the first n numbers.\"\"\"
\ta, b = 0, 1  # mixed indentation
    return [(a := b, b := a + b)[0] for _ in range(n)] if n > 0 else []

int main(void) { for (int i = 0; i < 10 && !done; ++i) { x[i] ^= ~y->z << 2; } return 0; }
SELECT COUNT(*) AS "Total" FROM Users WHERE name LIKE 'O''Brien%' AND age >= 18;
const f = async ({a, ...rest}) => `${a}: ${JSON.stringify(rest ?? {})}`; // TODO
{"key": [1, -2.5e3, true, null, "\\u00e9\\n"], "nested": {"a": {"b": []}}}
\\begin{equation} E = mc^2 \\sum_{i=1}^{N} \\frac{x_i}{\\sqrt{2\\pi}} \\end{equation}
| a | b |\n|---|:-:|\n| **x** | `y` |
"""
_SYLLABLES = [
    "ka",
    "to",
    "re",
    "mi",
    "lu",
    "sha",
    "tion",
    "ing",
    "pre",
    "un",
    "er",
    "th",
    "qu",
    "ble",
    "ough",
    "str",
    "eau",
    "zz",
    "y",
    "ed",
    "xen",
    "bri",
]
_JOINTS = (" ", " ", " ", " ", " ", ", ", ". ", "-", "'", "\n", "  ", "/", "_", "; ")
_WORDS = 6_000
_WORDS_PER_TEXT = 100


@functools.cache
def probe_texts() -> tuple[str, ...]:
    """Return the texts on which two tokenizers are compared."""
    return (*_FIXED_TEXTS, _CODE, *_characters(), *_words())


def same_tokens(one: Encode, other: Encode, *, apart_from: Sequence[str] = ()) -> bool:
    """Return True if two tokenizers produce the same tokens of every text.

    `apart_from` are special tokens that only one of the tokenizers has. The texts are split where
    one of them occurs, so no text contains any of them.
    """
    texts = list(probe_texts())
    for token in filter(None, apart_from):
        texts = [piece for text in texts for piece in text.split(token)]
    return all(
        list(mine) == list(others) for mine, others in zip(one(texts), other(texts), strict=True)
    )


def _characters() -> list[str]:
    """Return texts with characters of each Unicode block, side by side and between letters."""
    found = []
    for first, end, step in _BLOCKS:
        characters = [chr(code) for code in range(first, end, step)]
        for start in range(0, len(characters), _CHARACTERS_PER_TEXT):
            group = characters[start : start + _CHARACTERS_PER_TEXT]
            found.append("".join(group) + " " + " ".join(f"a{each}" for each in group))
    return found


def _words() -> list[str]:
    """Return texts of random syllables in lower, upper and title case, and of numbers."""
    found: list[str] = []
    state = 1
    for index in range(_WORDS):
        # A linear congruential generator with the constants of Numerical Recipes.
        state = (1664525 * state + 1013904223) % 2**32
        value = state >> 8
        word = "".join(
            _SYLLABLES[(value >> (5 * at)) % len(_SYLLABLES)] for at in range(1 + value % 3)
        )
        kind = (state >> 27) % 8
        word = (word.upper(), word.title(), str(value % 10**5))[kind] if kind < 3 else word
        if index % _WORDS_PER_TEXT == 0:
            found.append("")
        found[-1] += word + _JOINTS[(state >> 20) % len(_JOINTS)]
    return found
