"""FP32 masters in two parts: the bf16 weight that the model computes with, and the remainder beside it.

A master's upper 16 bits, rounded half away from zero, are the weight; what is left is a signed 16-bit number
of the same bit pattern's lower half. Nothing is lost, and the weight is the nearest bf16: 4 bytes a parameter
where a separate FP32 copy makes 6. With ties to even, a tie would need a remainder of +32768, which int16
lacks. An 8-bit remainder makes a master of 24 bits, rounded stochastically; none makes one of 16.

The weight is the user's: where it was edited, the remainder belongs to another number. Then the master is
still within one bf16 ulp of the weight, an infinity never turns into NaN, and a NaN weight is a NaN master. A zero
beside a positive remainder is a master below 2^-133, a subnormal, and beside another one zero; the weight
itself stays 0 until the optimizer moves it.
"""
