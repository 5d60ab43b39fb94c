"""Looking at training steps from outside: the ranges of their numbers, and where one that is not finite came from."""
