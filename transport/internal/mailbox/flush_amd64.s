#include "textflag.h"

// func cpuid(leaf, part uint32) (a, b, c, d uint32)
TEXT ·cpuid(SB), NOSPLIT, $0-24
	MOVL leaf+0(FP), AX
	MOVL part+4(FP), CX
	CPUID
	MOVL AX, a+8(FP)
	MOVL BX, b+12(FP)
	MOVL CX, c+16(FP)
	MOVL DX, d+20(FP)
	RET

// CLWB is ordered after earlier stores to its line, and SFENCE orders it before later stores.

// func clwb(first unsafe.Pointer, lines int)
TEXT ·clwb(SB), NOSPLIT, $0-16
	MOVQ first+0(FP), AX
	MOVQ lines+8(FP), CX

next:
	CLWB (AX)
	ADDQ $64, AX
	DECQ CX
	JNZ  next
	SFENCE
	RET

// CLFLUSHOPT writes a line back and drops it. MFENCE orders it after earlier loads and before later ones.

// func clflushopt(first unsafe.Pointer, lines int)
TEXT ·clflushopt(SB), NOSPLIT, $0-16
	MOVQ first+0(FP), AX
	MOVQ lines+8(FP), CX
	MFENCE

next:
	CLFLUSHOPT (AX)
	ADDQ       $64, AX
	DECQ       CX
	JNZ        next
	MFENCE
	RET

// func clflush(first unsafe.Pointer, lines int)
TEXT ·clflush(SB), NOSPLIT, $0-16
	MOVQ first+0(FP), AX
	MOVQ lines+8(FP), CX
	MFENCE

next:
	CLFLUSH (AX)
	ADDQ    $64, AX
	DECQ    CX
	JNZ     next
	MFENCE
	RET
