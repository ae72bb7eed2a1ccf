"""Types of the C++ core. It is absent where no C++20 compiler was at hand at installation."""

def build_info() -> dict[str, str]:
    """Says how this core was built.

    Returns:
        ``compiler``, ``standard`` (value of ``__cplusplus``), ``flags`` (what torchext adds to Python's own),
        ``pybind11``, ``python`` (version of the headers) and ``assertions`` (``on`` or ``off``).
    """
