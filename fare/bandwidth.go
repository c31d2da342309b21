package fare

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// Bandwidth is a data rate in bit/s, from 0 to [MaxBandwidth]. The zero value
// is a rate of 0 bit/s. On a route it is a valid value ("this path is in
// maintenance") and differs from a route without a value (see [Advertised]).
type Bandwidth uint64

// MaxBandwidth is the highest rate the package computes with, 2^53 bit/s (about
// 9 Pbit/s). Every rate up to it is exact as a float64, and the sums and
// products that the package forms fit 64 bits or are computed in 128.
const MaxBandwidth Bandwidth = 1 << 53

// Decimal multiples of one bit/s. Rates of links are powers of ten, never of
// 1024.
const (
	Kilobit Bandwidth = 1e3
	Megabit Bandwidth = 1e6
	Gigabit Bandwidth = 1e9
	Terabit Bandwidth = 1e12
	Petabit Bandwidth = 1e15
)

// ErrBandwidth is wrapped by every error of [ParseBandwidth].
var ErrBandwidth = errors.New("write a number of bit/s with an optional unit, such as 400G, 1.6T, 8Mbit/s or 800000000000")

// bandwidthUnits are sorted from the largest to the smallest; the last one has
// no letter.
var bandwidthUnits = [...]struct {
	letter string
	digits int // power of ten
}{{"P", 15}, {"T", 12}, {"G", 9}, {"M", 6}, {"k", 3}, {"", 0}}

// ParseBandwidth parses a rate: a decimal number, an optional unit letter (k or
// K, M, G, T, P; powers of ten) and an optional "bps" or "bit/s", as in 400G,
// 400Gbps, 1.6T, 8Mbit/s or 800000000000. It is exact: a rate that is not a
// whole number of bit/s, is negative or exceeds [MaxBandwidth] returns an error
// that wraps [ErrBandwidth]. Bytes ("GB/s") and powers of two ("Gi") are
// refused.
func ParseBandwidth(s string) (Bandwidth, error) {
	refuse := func(why string) (Bandwidth, error) {
		return 0, fmt.Errorf("bandwidth %q: %s: %w", s, why, ErrBandwidth)
	}
	end := 0
	for end < len(s) && (s[end] >= '0' && s[end] <= '9' || s[end] == '.') {
		end++
	}
	number, unit := s[:end], strings.TrimPrefix(s[end:], " ")
	if number == "" {
		return refuse("does not start with a digit")
	}
	power := 0
	if unit != "" {
		for _, u := range bandwidthUnits {
			if u.letter != "" && (unit[:1] == u.letter || u.letter == "k" && unit[:1] == "K") {
				power, unit = u.digits, unit[1:]
				break
			}
		}
	}
	if unit != "" && unit != "bps" && unit != "bit/s" {
		return refuse(fmt.Sprintf("unknown unit %q", s[end:]))
	}

	whole, fraction, dot := strings.Cut(number, ".")
	if whole == "" || dot && fraction == "" || strings.Contains(fraction, ".") {
		return refuse("is not a decimal number")
	}
	fraction = strings.TrimRight(fraction, "0")
	if len(fraction) > power {
		return refuse("is not a whole number of bit/s")
	}
	digits := strings.TrimLeft(whole+fraction+strings.Repeat("0", power-len(fraction)), "0")
	if digits == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(digits, 10, 64)
	if err != nil || Bandwidth(n) > MaxBandwidth {
		return refuse("is above the highest rate, " + MaxBandwidth.String() + " bit/s")
	}
	return Bandwidth(n), nil
}

// String returns the shortest exact form that [ParseBandwidth] accepts: 400G,
// 1.6T, 1500000001. Among forms of equal length the one with the larger unit
// wins.
func (b Bandwidth) String() string {
	plain := strconv.FormatUint(uint64(b), 10)
	best := plain
	for i := len(bandwidthUnits) - 2; i >= 0; i-- {
		u := bandwidthUnits[i]
		if len(plain) <= u.digits {
			break
		}
		point := len(plain) - u.digits
		text := plain[:point]
		if fraction := strings.TrimRight(plain[point:], "0"); fraction != "" {
			text += "." + fraction
		}
		if text += u.letter; len(text) <= len(best) {
			best = text
		}
	}
	return best
}

// Add returns b + c, capped at [MaxBandwidth].
func (b Bandwidth) Add(c Bandwidth) Bandwidth {
	if b >= MaxBandwidth || c >= MaxBandwidth-b {
		return MaxBandwidth
	}
	return b + c
}

// Part returns b * part / whole, rounded to the nearest bit/s: the share of b
// that is proportional to part of whole. part must not exceed whole. A nonzero
// part of a nonzero b is at least 1 bit/s, because zero would mean maintenance.
func (b Bandwidth) Part(part, whole Bandwidth) Bandwidth {
	if b == 0 || part == 0 {
		return 0
	}
	return Bandwidth(max(scale(uint64(b), uint64(part), uint64(whole)), 1))
}

// MarshalText returns [Bandwidth.String].
func (b Bandwidth) MarshalText() ([]byte, error) { return []byte(b.String()), nil }

// UnmarshalText parses text by [ParseBandwidth].
func (b *Bandwidth) UnmarshalText(text []byte) error {
	v, err := ParseBandwidth(string(text))
	if err != nil {
		return err
	}
	*b = v
	return nil
}
