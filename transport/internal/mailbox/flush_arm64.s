#include "textflag.h"

// func cacheType() uint64
TEXT ·cacheType(SB), NOSPLIT, $0-8
	WORD $0xd53b0020 // mrs x0, ctr_el0
	MOVD R0, ret+0(FP)
	RET

// DC CVAC writes a line back to the point of coherency; DC CIVAC drops it, too.

// func cvac(first unsafe.Pointer, lines, step int)
TEXT ·cvac(SB), NOSPLIT, $0-24
	MOVD first+0(FP), R0
	MOVD lines+8(FP), R1
	MOVD step+16(FP), R2
	ADD  R1<<6, R0, R1 // the end

next:
	WORD $0xd50b7a20 // dc cvac, x0
	ADD  R2, R0
	CMP  R1, R0
	BLO  next
	DSB  $15         // sy
	RET

// func civac(first unsafe.Pointer, lines, step int)
TEXT ·civac(SB), NOSPLIT, $0-24
	MOVD first+0(FP), R0
	MOVD lines+8(FP), R1
	MOVD step+16(FP), R2
	ADD  R1<<6, R0, R1
	DSB  $15

next:
	WORD $0xd50b7e20 // dc civac, x0
	ADD  R2, R0
	CMP  R1, R0
	BLO  next
	DSB  $15
	RET
