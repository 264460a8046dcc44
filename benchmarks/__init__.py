"""Speed and memory against peers, measured in the same run; never a test."""
