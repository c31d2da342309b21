package superp

import "time"

const (
	// reusePause is the time for which a psn must not be assigned again after its latest transmission (two maximum
	// segment lifetimes).
	reusePause = 2 * time.Second
	// reuseShift divides the psns into blocks of 2^27. At the description's highest rate, 1.9 billion packets per
	// second, all other blocks take 2.19 s.
	reuseShift  = 27
	reuseBlocks = 1 << (32 - reuseShift)
)

// reuse is the protection against psns that wrap around. A time for each of the 2^32 psns would take 32 GB, so it has
// the latest transmission of any psn of a block, which delays the block's first psn at most until all of them may be
// used.
type reuse struct {
	shift    uint8                      // a test has fewer psns
	latest   [reuseBlocks]time.Duration // 0: none since the block was entered
	free     time.Duration              // from then on the next psn may be assigned; 0: at any time
	reported bool                       // the present pause has been reported
}

func (u *reuse) block(psn uint32) *time.Duration { return &u.latest[psn>>u.shift%reuseBlocks] }

// sent records a transmission of a psn.
func (u *reuse) sent(psn uint32, now time.Duration) { *u.block(psn) = max(now, 1) }

// assigned records that a psn was assigned. If the next one begins a block, that must wait for the end of the block's
// pause.
func (u *reuse) assigned(psn uint32) {
	if next := psn + 1; next&(1<<u.shift-1) == 0 {
		b := u.block(next)
		if u.free, u.reported = 0, false; *b != 0 {
			u.free = *b + reusePause
		}
		*b = 0
	}
}

// allows reports whether the next psn may be assigned.
func (u *reuse) allows(now time.Duration) bool {
	if now >= u.free {
		u.free = 0
	}
	return u.free == 0
}

// tooEarly reports, once per pause, that a psn is needed before it may be used again.
func (u *reuse) tooEarly() bool {
	first := !u.reported
	u.reported = true
	return first
}
