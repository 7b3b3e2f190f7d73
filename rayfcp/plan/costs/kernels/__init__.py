"""Compiled loops over the rounds of a layout. Arrays in, arrays out; imported where a layout is priced."""
