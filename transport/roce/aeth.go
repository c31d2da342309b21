package roce

import "time"

// Syndromes of the AETH (Section 9.7.5): bits 6-5 are the type, bits 4-0 the credit count, the timer or the code.
const (
	syndromeACK  = 0x00
	syndromeRNR  = 0x20
	syndromeNAK  = 0x60
	syndromeMask = 0x60
	codeMask     = 0x1f

	// noCredits disables end-to-end flow control (Section 9.7.7.2).
	noCredits = 0x1f

	nakSequence    = syndromeNAK
	nakInvalid     = syndromeNAK | 1
	nakAccess      = syndromeNAK | 2
	nakOperational = syndromeNAK | 3
)

// rnrTimers maps the timer codes of an RNR NAK to times (Section 9.7.5), in units of 10 µs.
var rnrTimers = [32]uint32{
	65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192,
	256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
}

// rnrWait returns the minimum delay of the requester.
func rnrWait(code uint8) time.Duration {
	return time.Duration(rnrTimers[code&codeMask]) * 10 * time.Microsecond
}

// rnrCode returns the code of the shortest timer that is not shorter than d; d is at most 655.36 ms.
func rnrCode(d time.Duration) uint8 {
	for code := uint8(1); code < 32; code++ {
		if rnrWait(code) >= d {
			return code
		}
	}
	return 0
}
