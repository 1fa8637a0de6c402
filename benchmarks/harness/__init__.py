"""The shared parts of the benchmarks: cases, contenders, timers, options and reports."""
