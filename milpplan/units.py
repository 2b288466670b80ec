"""The only place where SI values become something for people, and where bare powers of ten live."""

from __future__ import annotations

import math
import re
import unicodedata

GIB = 2**30
MIB = 2**20
MEGA = 1e6
GIGA = 1e9
TERA = 1e12
NS_PER_S = 1_000_000_000
TRILLION = 10**12
SECONDS_PER_HOUR = 3600.0
HOURS_PER_DAY = 24.0


def gpu_hours(num_gpus: float, tokens: float, tokens_per_s: float) -> float:
    """GPU-hours of training on ``tokens`` tokens: num_gpus * tokens / tokens_per_s / 3600.

    Source: definition; 380 tokens/s and GPU give the 1,022,362 A100-hours of LLaMA-65B's 1.4T tokens within
    0.2 % (Touvron et al. 2023, section 2.4 and table 15).
    """
    return num_gpus * tokens / tokens_per_s / SECONDS_PER_HOUR


def money_text(amount: float) -> str:
    """An amount of money, in whatever currency the price was: 412, 3.142M."""
    return f"{amount:,.0f}" if abs(amount) < 1e6 else count_text(amount)


def lower_money_text(amount: float) -> str:
    """A proved lower bound of an amount of money, rounded down."""
    unit = 1.0 if amount < 1e6 else 10.0 ** (math.floor(math.log10(amount)) - 3)
    return money_text(math.floor(amount / unit) * unit)


def seconds_text(seconds: float) -> str:
    """A duration in the unit a person would choose, e.g. ``13.75 s`` or ``412 us``."""
    if seconds != seconds or seconds in (float("inf"), float("-inf")):
        return "-"
    magnitude = abs(seconds)
    if magnitude >= 1.0:
        return f"{seconds:,.4g} s" if magnitude < 1000 else f"{seconds:,.0f} s"
    if magnitude >= 1e-3:
        return f"{seconds * 1e3:.4g} ms"
    return f"{seconds * 1e6:.3g} us"


def lower_bound_text(seconds: float) -> str:
    """A proved lower bound of a duration, rounded down, so that the text claims no more than the proof."""
    if not 0.0 < seconds < float("inf"):
        return seconds_text(seconds)
    digits = 4 if seconds >= 1e-3 else 3
    place = min(math.floor(math.log10(seconds)) - digits + 1, 0)
    return seconds_text(math.floor(seconds * 10.0**-place) / 10.0**-place)


def gib_text(num_bytes: float) -> str:
    """A memory size in GiB (2**30 bytes), one decimal."""
    return f"{num_bytes / GIB:,.1f} GiB"


def rate_text(per_second: float) -> str:
    """A rate with thousands separators, no unit."""
    return f"{per_second:,.0f}"


def count_text(number: float) -> str:
    """A count such as a parameter number in the field's words: 70.6B, 1.01T."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= limit:
            return f"{number / limit:.4g}{suffix}"
    return f"{number:,.0f}"


def counted(number: int | str, noun: str, plural: str | None = None) -> str:
    """Write a number with its noun in the singular or the plural: 1 replica, 2 replicas, 1,024 GPUs.

    Args:
        number: How many, or several numbers as a text.
        noun: One of them.
        plural: Several of them, where an s does not make it.
    """
    text = number if isinstance(number, str) else f"{number:,}"
    return f"{text} {noun if text == '1' else plural or noun + 's'}"


def engineering_text(value: float) -> str:
    """A large number with all its digits and an exponent of a multiple of three: 120e9, 85.520809984e9, 80."""
    for limit, suffix in ((1e12, "e12"), (1e9, "e9"), (1e6, "e6")):
        if abs(value) >= limit:
            return f"{value / limit:.15g}{suffix}"
    return f"{value:.15g}"


def percent_text(fraction: float, digits: int = 1) -> str:
    """A fraction in [0, 1] as per cent."""
    return f"{fraction * 100:.{digits}f} %"


def times_text(ratio: float) -> str:
    """A ratio with three digits: 1.25 ×."""
    return f"{ratio:.3g} \N{MULTIPLICATION SIGN}"


def signed_percent_text(fraction: float, digits: int = 1) -> str:
    """A relative change as per cent with its sign, e.g. ``+2.1 %``; what rounds to nothing has none."""
    text = f"{fraction * 100:+.{digits}f}"
    return f"{text.lstrip('+-') if float(text) == 0 else text} %"


def tolerance_text(tolerance: float) -> str:
    """Write a tolerance exactly, in the shorter notation: 0.001 as 1e-3, 0.01 as 0.01."""
    text = f"{tolerance:g}" if float(f"{tolerance:g}") == tolerance else repr(float(tolerance))
    mantissa, _, exponent = text.partition("e")
    if not exponent and 0 < tolerance <= 1e-3:
        scientific = f"{tolerance:e}" if float(f"{tolerance:e}") == tolerance else f"{tolerance:.16e}"
        mantissa, _, exponent = scientific.partition("e")
        mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def gap_text(gap: float) -> str:
    """A relative gap; tiny ones in scientific notation so that 1e-5 does not print as zero."""
    return "0" if gap == 0 else f"{gap:.1e}"


def bandwidth_text(bytes_per_s: float) -> str:
    """A rate of bytes in GB/s (1e9 bytes/s)."""
    return f"{bytes_per_s / 1e9:,.4g} GB/s"


def size_text(num_bytes: float) -> str:
    """A memory size in the unit a person would choose: GiB, MiB or KiB."""
    for limit, unit in ((GIB, "GiB"), (MIB, "MiB")):
        if num_bytes >= limit:
            return f"{num_bytes / limit:,.4g} {unit}"
    return f"{num_bytes / 1024:,.4g} KiB"


def bytes_text(num_bytes: float) -> str:
    """Bytes on a wire in decimal units, as links are rated: kB, MB, GB, TB, PB."""
    for limit, unit in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= limit:
            return f"{num_bytes / limit:,.3g} {unit}"
    return f"{num_bytes:,.0f} B"


def cleaned(text: str) -> str:
    """Spell out what a terminal or an editor would obey rather than show: ``\\u001b``, ``\\u202e``.

    These are control characters but for line feeds and tabs, marks of direction, zero-width characters, odd line
    separators and halves of characters. In the strings of JSON, YAML and TOML what is spelled out means the same.
    """
    return _DOUBTFUL.sub(lambda match: _spelled(match[0]), text)


def printable(text: str) -> str:
    """Spell out line feeds and tabs, too: a name from a user's file stays on its line."""
    return cleaned(text).replace("\n", "\\n").replace("\t", "\\t")


# Plain ASCII is never looked at, nor are the letters of most languages.
_DOUBTFUL = re.compile("[^\n\t -~\u00c0-\u02ff\u0370-\u05ff\u2190-\u27ff\u3040-\u9fff\uac00-\ud7a3]")
_OBEYED = ("Cc", "Cf", "Cs", "Zl", "Zp")


def _spelled(character: str) -> str:
    if unicodedata.category(character) not in _OBEYED:
        return character
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
