package config

import (
	"encoding/hex"
	"fmt"
	"math"
	"regexp"

	"github.com/fared/fared/daemon/config/internal/model"
	"github.com/fared/fared/wecmp"
)

// Hasher returns the hash plug-in of a valid Hash, or nil if the hash is unknown, or not yet known (dataplane).
func (h Hash) Hasher() wecmp.Hasher {
	switch h.Algorithm {
	case HashLinux:
		return wecmp.LinuxL4{Seed: h.Seed, Buckets: h.Buckets}
	case HashCRC16, HashCRC16Bisync:
		return wecmp.CRC16{Bisync: h.Algorithm == HashCRC16Bisync, Seed: uint16(h.Seed)}
	case HashCRC32:
		return wecmp.CRC32{Seed: h.Seed}
	case HashXOR:
		return wecmp.XOR{}
	case HashToeplitz:
		if h.Key == "" {
			return wecmp.Toeplitz{}
		}
		if key, err := hex.DecodeString(h.Key); err == nil {
			return wecmp.Toeplitz{Key: key}
		}
	}
	return nil
}

var hashKey = regexp.MustCompile(`^([0-9A-Fa-f]{2}){40,64}$`)

// hash checks that a hash has exactly the keys that its algorithm uses.
func (p *problems) hash(h Hash, subPorts int) {
	const path = "weights.hash"
	switch h.Algorithm {
	case HashLinux:
		if h.Seed == 0 {
			p.add(path+".seed", "is 0, which lets the kernel choose a random seed that fared cannot read", "set net.ipv4.fib_multipath_hash_seed and write its value")
		}
		if h.Buckets != 0 && h.Buckets < subPorts {
			p.add(path+".buckets", fmt.Sprintf("%d is fewer than the %d sub-ports", h.Buckets, subPorts),
				fmt.Sprintf("use at least %d, or 0 for a plain group", subPorts))
		}
	case HashCRC16, HashCRC16Bisync:
		if h.Seed > math.MaxUint16 {
			p.add(path+".seed", fmt.Sprintf("%d exceeds 16 bits", h.Seed), "use 0 to 65535")
		}
	case HashCRC32:
	default:
		if h.Seed != 0 {
			p.add(path+".seed", h.Algorithm+" has no seed", "remove it")
		}
	}
	if h.Buckets != 0 && h.Algorithm != HashLinux {
		p.add(path+".buckets", h.Algorithm+" has no buckets", "remove it, or use algorithm: linux")
	}
	switch {
	case h.Key == "":
	case h.Algorithm != HashToeplitz:
		p.add(path+".key", h.Algorithm+" has no key", "remove it, or use algorithm: toeplitz")
	case !hashKey.MatchString(h.Key):
		p.add(path+".key", model.Show(h.Key)+" is not a Toeplitz key", "use 80 to 128 hexadecimal digits, in pairs")
	}
}
