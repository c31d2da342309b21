package bfd

import (
	"crypto/md5"
	"crypto/sha1"
	"crypto/subtle"
	"encoding/binary"
	"errors"
	"fmt"
	"time"
)

// AuthType is the type of authentication of a session (RFC 5880, Section 4.1).
type AuthType uint8

// The supported types. Type 1, Simple Password, sends its password in clear text and is not supported.
const (
	NoAuth         AuthType = 0
	KeyedMD5       AuthType = 2
	MeticulousMD5  AuthType = 3
	KeyedSHA1      AuthType = 4
	MeticulousSHA1 AuthType = 5
)

// digestLen returns the length of the type's digest, which is also the length of its longest key, or 0 for an
// unsupported type.
func (t AuthType) digestLen() int {
	switch t {
	case KeyedMD5, MeticulousMD5:
		return md5.Size
	case KeyedSHA1, MeticulousSHA1:
		return sha1.Size
	}
	return 0
}

// meticulous reports whether every packet has a sequence number above that of the packet before.
func (t AuthType) meticulous() bool { return t == MeticulousMD5 || t == MeticulousSHA1 }

// Auth configures the authentication of a session. The zero value disables it.
type Auth struct {
	Type AuthType
	// Keys lists the accepted keys; the first one signs. IDs are unique.
	Keys []Key
}

// Key is a secret that both ends know by its ID.
type Key struct {
	ID uint8
	// Secret has 1 to 16 octets for MD5, 1 to 20 for SHA1.
	Secret string
}

// String returns the key without its secret.
func (k Key) String() string { return fmt.Sprintf("key %d", k.ID) }

// Validate returns the first error of a configuration, without secrets.
func (a Auth) Validate() error {
	longest := a.Type.digestLen()
	switch {
	case a.Type == NoAuth && len(a.Keys) == 0:
		return nil
	case longest == 0:
		return fmt.Errorf("bfd: authentication type %d: use 2 to 5", a.Type)
	case len(a.Keys) == 0:
		return errors.New("bfd: authentication without a key")
	}
	seen := make(map[uint8]bool)
	for _, k := range a.Keys {
		if len(k.Secret) < 1 || len(k.Secret) > longest {
			return fmt.Errorf("bfd: %v has %d octets: use 1 to %d", k, len(k.Secret), longest)
		}
		if seen[k.ID] {
			return fmt.Errorf("bfd: %v is configured twice", k)
		}
		seen[k.ID] = true
	}
	return nil
}

// find returns the secret of a key.
func (a Auth) find(id uint8) (secret string, found bool) {
	for _, k := range a.Keys {
		if k.ID == id {
			return k.Secret, true
		}
	}
	return "", false
}

// minSectionLen is the length of the two octets that every section has, sectionHeaderLen that of a supported section
// without its digest.
const (
	minSectionLen    = 2
	sectionHeaderLen = 8
)

// Section is the authentication section of a packet (RFC 5880, Sections 4.3 and 4.4). The zero value means that the
// packet has none. A section of an unsupported type, or with another length than that of its type, has only Type and
// Length.
type Section struct {
	Type     AuthType
	Length   uint8 // of the section; at least 2
	KeyID    uint8
	Reserved uint8 // ignored on reception, but part of the digest
	Sequence uint32
	Digest   [sha1.Size]byte // of MD5 only the first 16 octets
}

// present reports whether the packet has a section.
func (s *Section) present() bool { return s.Length != 0 }

// fits reports whether the type is supported and the length is that of the type.
func (s *Section) fits() bool {
	return s.Type.digestLen() != 0 && int(s.Length) == sectionHeaderLen+s.Type.digestLen()
}

// parseSection parses a section of at least two octets, whose second octet is its length.
func parseSection(b []byte) Section {
	s := Section{Type: AuthType(b[0]), Length: b[1]}
	if s.fits() {
		s.KeyID, s.Reserved, s.Sequence = b[2], b[3], binary.BigEndian.Uint32(b[4:])
		copy(s.Digest[:], b[sectionHeaderLen:])
	}
	return s
}

// appendTo appends a section that fits.
func (s *Section) appendTo(b []byte) []byte {
	b = append(b, byte(s.Type), s.Length, s.KeyID, s.Reserved)
	b = binary.BigEndian.AppendUint32(b, s.Sequence)
	return append(b, s.Digest[:s.Type.digestLen()]...)
}

// digest returns the digest of a packet with a section that fits: the hash of the packet with the secret, padded with
// zeros, in place of the digest (RFC 5880, Sections 6.7.3 and 6.7.4).
func (p Packet) digest(secret string) (sum [sha1.Size]byte) {
	p.Auth.Digest = [sha1.Size]byte{}
	copy(p.Auth.Digest[:], secret)
	var b [MaxPacketLen]byte
	wire := p.AppendTo(b[:0])
	if p.Auth.Type.digestLen() == md5.Size {
		short := md5.Sum(wire)
		copy(sum[:], short[:])
		return sum
	}
	return sha1.Sum(wire)
}

// sequencePace is the longest time for which a type that is not meticulous repeats a sequence number.
const sequencePace = time.Second

// authenticator holds the variables of a session's authentication (RFC 5880, Section 6.8.1).
type authenticator struct {
	conf Auth

	sent    uint32    // bfd.XmitAuthSeq
	advance time.Time // when sent was last incremented
	signed  Packet    // the last sent packet, without its section

	received uint32    // bfd.RcvAuthSeq
	until    time.Time // received counts before this time only (bfd.AuthSeqKnown); zero if no sequence number is known
}

// sign adds the section to a packet that is sent at a time. The sequence number of a type that is not meticulous is
// incremented when the contents change, and once per sequencePace.
func (a *authenticator) sign(p Packet, now time.Time) Packet {
	if a.conf.Type == NoAuth {
		return p
	}
	if a.conf.Type.meticulous() || p != a.signed || now.Sub(a.advance) >= sequencePace {
		a.sent++
		a.advance = now
	}
	a.signed = p
	key := a.conf.Keys[0]
	p.Auth = Section{
		Type: a.conf.Type, Length: uint8(sectionHeaderLen + a.conf.Type.digestLen()), KeyID: key.ID, Sequence: a.sent,
	}
	p.Auth.Digest = p.digest(key.Secret)
	return p
}

// check returns Accepted, or why a packet that arrived at a time must be discarded (RFC 5880, Sections 6.8.6, 6.7.3 and
// 6.7.4). It changes nothing: the sequence number of a packet counts only after the digest was verified, so that a
// forged packet does not set it.
func (a *authenticator) check(p Packet, now time.Time) Drop {
	switch {
	case a.conf.Type == NoAuth && !p.Auth.present():
		return Accepted
	case a.conf.Type == NoAuth:
		return AuthUnexpected
	case !p.Auth.present():
		return AuthMissing
	case p.Auth.Type != a.conf.Type:
		return AuthOtherType
	case !p.Auth.fits():
		return AuthLength
	}
	secret, found := a.conf.find(p.Auth.KeyID)
	if !found {
		return AuthUnknownKey
	}
	if now.Before(a.until) {
		least := uint32(0)
		if a.conf.Type.meticulous() {
			least = 1
		}
		// Modulo 2^32: a number below the last one is far ahead.
		if ahead := p.Auth.Sequence - a.received; ahead < least || ahead > 3*uint32(p.Multiplier) {
			return AuthSequence
		}
	}
	sum := p.digest(secret)
	if n := a.conf.Type.digestLen(); subtle.ConstantTimeCompare(sum[:n], p.Auth.Digest[:n]) != 1 {
		return AuthDigest
	}
	return Accepted
}

// accept notes the sequence number of an accepted packet. It counts for twice the detection time (RFC 5880, Section
// 6.8.1).
func (a *authenticator) accept(p Packet, now time.Time, detection time.Duration) {
	if a.conf.Type != NoAuth {
		a.received, a.until = p.Auth.Sequence, now.Add(2*detection)
	}
}
