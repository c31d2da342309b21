package speaker

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// AO is the master key tuple of a session (RFC 5925, Section 3.1). Both ends have the same Key and Algorithm; SendID at
// one end is ReceiveID at the other. The zero value disables TCP-AO.
type AO struct {
	Key               string // the master key, 1 to 80 octets; empty disables TCP-AO
	SendID, ReceiveID uint8
	Algorithm         AOAlgorithm
}

// AOAlgorithm is a pair of key derivation function and MAC. Of the MAC, 96 bits sign a segment (RFC 5926, Section 3).
type AOAlgorithm uint8

// The algorithms that RFC 5926 requires.
const (
	HMACSHA1   AOAlgorithm = iota // KDF_HMAC_SHA1 and HMAC-SHA-1-96
	AES128CMAC                    // KDF_AES_128_CMAC and AES-128-CMAC-96
)

// kernel returns the algorithm's name in struct tcp_ao_add. cmac(aes128) derives a key of 16 octets from keys of other
// lengths (RFC 5926, Section 3.1.1.2).
func (a AOAlgorithm) kernel() string {
	if a == AES128CMAC {
		return "cmac(aes128)"
	}
	return "hmac(sha1)"
}

// maxAOKey is TCP_AO_MAXKEYLEN, in octets.
const maxAOKey = 80

// aoMAC is the length of the MAC in a segment, in octets (RFC 5926, Section 3.2).
const aoMAC = 12

// The socket options of include/uapi/linux/tcp.h, Linux 6.7.
const (
	tcpAOAddKey = 38 // TCP_AO_ADD_KEY
	tcpAOInfo   = 40 // TCP_AO_INFO
)

// The flags of the structures below are bit fields of C, which begin at the lowest bit of a little-endian machine.
const (
	aoSetCurrent = 1 << 0 // in both structures: sign segments with this key
	aoSetRNext   = 1 << 1 // in both structures: ask the peer to sign with this key
	aoRequired   = 1 << 2 // in tcpAOInfoOpt: drop segments without a valid signature
)

// tcpAOAdd is struct tcp_ao_add, tcpAOInfoOpt is struct tcp_ao_info_opt.
type (
	tcpAOAdd struct {
		Addr              unix.SockaddrStorage
		Algorithm         [64]byte
		Ifindex           int32
		Flags             uint32
		Reserved          uint16
		Prefix            uint8
		SendID, ReceiveID uint8
		MACLen            uint8
		KeyFlags, KeyLen  uint8
		Key               [maxAOKey]byte
	}
	tcpAOInfoOpt struct {
		Flags           uint32
		Reserved        uint16
		Current, RNext  uint8
		Good, Bad       uint64
		NoKey, Unsigned uint64
		DroppedICMP     uint64
	}
)

// newAOAdd returns the key of segments to and from one address, on a socket of a family. A listener has no current key:
// its accepted connections use the peer's.
func newAOAdd(family int, peer netip.Addr, ao AO, current bool) tcpAOAdd {
	add := tcpAOAdd{SendID: ao.SendID, ReceiveID: ao.ReceiveID, MACLen: aoMAC, KeyLen: uint8(len(ao.Key))}
	add.Addr, add.Prefix = sockaddr(family, peer)
	copy(add.Algorithm[:], ao.Algorithm.kernel())
	copy(add.Key[:], ao.Key)
	if current {
		add.Flags = aoSetCurrent | aoSetRNext
	}
	return add
}

// addAO adds the key of segments to and from an address to a listener or to a socket before it connects.
func addAO(fd int, peer netip.Addr, ao AO, current bool) error {
	family, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	if err != nil {
		return fmt.Errorf("SO_DOMAIN: %w", err)
	}
	add := newAOAdd(family, peer, ao, current)
	if err := setStruct(fd, tcpAOAddKey, &add); err != nil {
		return fmt.Errorf("TCP_AO_ADD_KEY: %w", err)
	}
	return nil
}

// requireAO makes a connection drop every segment without a valid signature. It returns an error for a connection that
// was established without TCP-AO.
func requireAO(fd int) error {
	if err := setStruct(fd, tcpAOInfo, &tcpAOInfoOpt{Flags: aoRequired}); err != nil {
		return fmt.Errorf("TCP_AO_INFO: %w", err)
	}
	return nil
}

// setStruct sets a TCP option to a structure without padding.
func setStruct(fd, option int, v any) error {
	data, err := binary.Append(nil, binary.NativeEndian, v)
	if err != nil {
		return err
	}
	return unix.SetsockoptString(fd, unix.IPPROTO_TCP, option, string(data))
}

// CheckAO returns an error that explains why the kernel cannot sign with an algorithm, or nil if it can.
func CheckAO(a AOAlgorithm) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("tcp_ao: open a socket to try the key on: %w", err)
	}
	defer unix.Close(fd)
	return aoMissing(addAO(fd, loopback, AO{Key: "probe", Algorithm: a}, true), a)
}

// aoMissing adds the remedy to the kernel's error for a well-formed key.
func aoMissing(err error, a AOAlgorithm) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENOENT):
		return fmt.Errorf("tcp_ao: this kernel has no %s: load its module, or use the other algorithm (%w)", a.kernel(), err)
	case errors.Is(err, unix.ENOPROTOOPT), errors.Is(err, unix.ENOSYS), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EINVAL):
		return fmt.Errorf("tcp_ao: this kernel has no TCP-AO (needs Linux 6.7 and CONFIG_TCP_AO); use password_file (%w)", err)
	}
	return fmt.Errorf("tcp_ao: %w", err)
}

// checkAO returns an error if the kernel cannot sign with an algorithm of a session.
func (c *Config) checkAO() error {
	var errs []error
	tried := make(map[AOAlgorithm]bool)
	for i := range c.Sessions {
		s := &c.Sessions[i]
		if s.AO.Key == "" || tried[s.AO.Algorithm] {
			continue
		}
		tried[s.AO.Algorithm] = true
		if err := CheckAO(s.AO.Algorithm); err != nil {
			errs = append(errs, fmt.Errorf("speaker: session %q: %w", s.Name, err))
		}
	}
	return errors.Join(errs...)
}
