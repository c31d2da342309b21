package bfd

import (
	"bytes"
	"crypto/md5"
	"crypto/sha1"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/netnstest"
)

var kinds = []AuthType{KeyedMD5, MeticulousMD5, KeyedSHA1, MeticulousSHA1}

func keyed(kind AuthType, keys ...Key) *Machine {
	return NewMachine(MachineConfig{Discriminator: 1, Interval: 100 * time.Millisecond, Multiplier: 3, Random: none, Auth: Auth{kind, keys}})
}

// from returns a packet of the neighbor with a sequence number and a digest of its own making.
func from(kind AuthType, k Key, sequence uint32, p Packet) Packet {
	p.Auth = Section{Type: kind, Length: map[AuthType]uint8{KeyedMD5: 24, MeticulousMD5: 24, KeyedSHA1: 28, MeticulousSHA1: 28}[kind], KeyID: k.ID, Sequence: sequence}
	wire := p.AppendTo(nil)
	copy(p.Auth.Digest[:], rfcDigest(wire, k.Secret))
	return p
}

var down = Packet{State: Down, Multiplier: 3, MyDiscr: 2, DesiredMinTx: time.Second, RequiredMinRx: time.Second}

// rfcDigest is the digest of a packet by the text of RFC 5880, Sections 4.3, 4.4, 6.7.3 and 6.7.4: "the shared key is
// stored in this field, padded with trailing zero bytes if needed", and the digest is calculated "over the entire BFD
// Control packet".
func rfcDigest(wire []byte, secret string) []byte {
	var packet []byte
	packet = append(packet, wire[:32]...)
	packet = append(packet, secret...)
	for len(packet) < len(wire) {
		packet = append(packet, 0)
	}
	if wire[24] == 2 || wire[24] == 3 {
		h := md5.New()
		h.Write(packet)
		return h.Sum(nil)
	}
	h := sha1.New()
	h.Write(packet)
	return h.Sum(nil)
}

// rfcReceiver is the twin of the reception rules, written from the text of RFC 5880, Section 6.7.3 and 6.7.4, over
// octets and without arithmetic modulo 2^32: it steps through the window one by one.
type rfcReceiver struct {
	authType     byte
	keys         map[byte]string
	authSeqKnown bool
	rcvAuthSeq   uint32
	forgetAt     time.Time // twice the detection time after the last accepted packet
}

func (r *rfcReceiver) accepts(b []byte, now time.Time) bool {
	if r.authSeqKnown && !now.Before(r.forgetAt) {
		r.authSeqKnown = false // "MUST be set to zero after no packets have been received on this session for at least twice the Detection Time"
	}
	b = b[:b[3]]
	if b[1]&0x04 == 0 || b[24] != r.authType {
		return false // "does not contain an Authentication Section, or the Auth Type is not correct"
	}
	if r.authType < 4 && b[25] != 24 || r.authType >= 4 && b[25] != 28 {
		return false // "the Auth Len field is not equal to 24" (28)
	}
	secret, found := r.keys[b[26]]
	if !found {
		return false // "does not match the ID of a configured authentication key"
	}
	sequence := uint32(b[28])<<24 | uint32(b[29])<<16 | uint32(b[30])<<8 | uint32(b[31])
	if r.authSeqKnown {
		inside := false
		step := r.rcvAuthSeq
		for i := 0; i <= 3*int(b[2]); i++ { // "bfd.RcvAuthSeq to bfd.RcvAuthSeq+(3*Detect Mult) inclusive", meticulous: "bfd.RcvAuthSeq+1"
			first := r.authType == 3 || r.authType == 5
			if sequence == step && (i > 0 || !first) {
				inside = true
			}
			if step == 0xffffffff {
				step = 0
			} else {
				step++
			}
		}
		if !inside {
			return false
		}
	}
	if !bytes.Equal(rfcDigest(b, secret), b[32:]) {
		return false
	}
	r.authSeqKnown, r.rcvAuthSeq = true, sequence
	return true
}

// TestAuthAgainstTwin compares the verdicts over packets of a neighbor, their repetitions, and their mutations, with
// those of the rules of the RFC.
func TestAuthAgainstTwin(t *testing.T) {
	for round := range 400 {
		seed := rand.Uint64()
		r := rand.New(rand.NewPCG(seed, uint64(round)))
		kind := kinds[r.IntN(len(kinds))]
		keys := []Key{{1, "one"}, {0, "zero and sixteen"}, {200, "x"}}
		m := keyed(kind, keys...)
		twin := &rfcReceiver{authType: byte(kind), keys: map[byte]string{1: "one", 0: "zero and sixteen", 200: "x"}}
		sequence := uint32(r.Uint64())
		if r.IntN(2) == 0 {
			sequence = -uint32(r.IntN(50)) // wraps around soon
		}
		var sent [][]byte
		accepted, discarded := 0, map[Drop]int{}
		now := epoch
		for range 300 {
			now = now.Add(time.Duration(r.Int64N(int64(400 * time.Millisecond))))
			if r.IntN(40) == 0 {
				now = now.Add(time.Duration(r.Int64N(int64(8 * time.Second)))) // up to some detection times
			}
			m.Advance(now)
			p := down
			p.State, p.YourDiscr = State(r.IntN(4)), 1
			p.Multiplier = uint8(1 + r.IntN(4))
			p.DesiredMinTx = time.Duration(1+r.IntN(1000)) * time.Millisecond
			switch r.IntN(4) {
			case 0:
			case 1:
				sequence += uint32(r.IntN(14))
			case 2:
				sequence++
			case 3:
				if r.IntN(20) == 0 {
					sequence = uint32(r.Uint64())
				}
			}
			wire := from(kind, keys[r.IntN(len(keys))], sequence, p)
			b := wire.AppendTo(nil)
			switch r.IntN(6) {
			case 0:
				b[r.IntN(len(b)-1)+1] ^= 1 << r.IntN(8)
			case 1:
				b[24], b[25] = byte(r.IntN(7)), byte(24+4*r.IntN(2))
				if r.IntN(2) == 0 {
					b[25] = byte(2 + r.IntN(30))
				}
				b[3] = 24 + b[25]
				for len(b) < int(b[3]) {
					b = append(b, 0)
				}
			case 2:
				b[26] = byte(r.IntN(256))
			case 3:
				if len(sent) > 0 {
					b = slices.Clone(sent[r.IntN(len(sent))])
				}
			}
			sent = append(sent, slices.Clone(b))
			parsed, err := ParsePacket(b)
			if err != nil || parsed.YourDiscr > 1 {
				continue // discarded before authentication
			}
			if m.state == Up && parsed.MyDiscr != m.remoteDiscr {
				continue
			}
			want := twin.accepts(b, now)
			drop := m.Receive(parsed, neighbor, now)
			if want != (drop == Accepted) {
				t.Fatalf("seed %d: type %d: % x: %s, the rules accept it: %v; last number %x, known until %v", seed, kind, b, drop, want, m.auth.received, m.auth.until.Sub(now))
			}
			if want {
				accepted++
				twin.forgetAt = now.Add(2 * time.Duration(parsed.Multiplier) * max(100*time.Millisecond, parsed.DesiredMinTx))
			}
			discarded[drop]++
		}
		if accepted == 0 || round == 0 && len(discarded) < 4 {
			t.Errorf("seed %d: %d accepted, discarded %v", seed, accepted, discarded)
		}
	}
}

// TestAuthReasons checks the reason of each discarded packet, and that a discarded packet changes nothing, not even the
// known sequence number.
func TestAuthReasons(t *testing.T) {
	key, other := Key{7, "secret"}, Key{7, "secreT"}
	for _, kind := range kinds {
		change := func(f func(p *Packet)) Packet { p := from(kind, key, 101, down); f(&p); return p }
		another := kinds[(slices.Index(kinds, kind)+1)%len(kinds)]
		sameLength := map[AuthType]AuthType{KeyedMD5: MeticulousMD5, MeticulousMD5: KeyedMD5, KeyedSHA1: MeticulousSHA1, MeticulousSHA1: KeyedSHA1}[kind]
		for _, c := range []struct {
			name string
			p    Packet
			want Drop
		}{
			{"valid", from(kind, key, 101, down), Accepted},
			{"no section", down, AuthMissing},
			{"simple password", change(func(p *Packet) { p.Auth = Section{Type: 1, Length: 9} }), AuthOtherType},
			{"reserved type 0", change(func(p *Packet) { p.Auth = Section{Length: 2} }), AuthOtherType},
			{"another type", from(another, key, 101, down), AuthOtherType},
			{"another type of the same length", from(sameLength, key, 101, down), AuthOtherType},
			{"length", change(func(p *Packet) { p.Auth = Section{Type: kind, Length: p.Auth.Length - 1} }), AuthLength},
			{"another key ID", from(kind, Key{8, "secret"}, 101, down), AuthUnknownKey},
			{"another key", from(kind, other, 101, down), AuthDigest},
			{"no digest", change(func(p *Packet) { p.Auth.Digest = [20]byte{} }), AuthDigest},
			{"last octet of the digest", change(func(p *Packet) { p.Auth.Digest[p.Auth.Length-9] ^= 1 }), AuthDigest},
			{"first octet of the digest", change(func(p *Packet) { p.Auth.Digest[0] ^= 0x80 }), AuthDigest},
			{"changed contents", change(func(p *Packet) { p.RequiredMinRx++; p.RequiredMinRx += time.Microsecond }), AuthDigest},
			{"changed state", change(func(p *Packet) { p.State = AdminDown }), AuthDigest},
			{"changed number", change(func(p *Packet) { p.Auth.Sequence++ }), AuthDigest},
			{"changed reserved octet", change(func(p *Packet) { p.Auth.Reserved++ }), AuthDigest},
			{"an old number", from(kind, key, 99, down), AuthSequence},
			{"a number too far ahead", from(kind, key, 110, down), AuthSequence},
			{"an old number with another key", from(kind, other, 99, down), AuthSequence},
		} {
			for _, known := range []bool{false, true} {
				m := keyed(kind, Key{1, "unused"}, key)
				if known {
					if drop := m.Receive(from(kind, key, 100, down), neighbor, epoch); drop != Accepted {
						t.Fatalf("the first packet: %s", drop)
					}
				}
				want := c.want
				if want == AuthSequence && !known {
					if want = Accepted; strings.HasSuffix(c.name, "another key") {
						want = AuthDigest
					}
				}
				before := *m
				got := m.Receive(c.p, neighbor, epoch.Add(time.Second))
				if got != want {
					t.Errorf("type %d, %s, known %v: %s, want %s", kind, c.name, known, got, want)
				}
				if got != Accepted && (m.Status() != before.Status() || m.auth.until != before.auth.until || m.auth.received != before.auth.received || m.lastReceived != before.lastReceived) {
					t.Errorf("type %d, %s: a discarded packet changed %+v to %+v", kind, c.name, before.auth, m.auth)
				}
			}
		}
		plain := testMachine(1, 100*time.Millisecond, 3)
		if got := plain.Receive(from(kind, key, 1, down), neighbor, epoch); got != AuthUnexpected {
			t.Errorf("type %d without authentication: %s", kind, got)
		}
	}
}

// TestAuthWindow checks the edges of the window of sequence numbers, also where it wraps around 2^32.
func TestAuthWindow(t *testing.T) {
	key := Key{1, "k"}
	for _, kind := range kinds {
		for _, last := range []uint32{0, 1, 5, 1 << 31, 1<<31 - 4, 1<<32 - 1, 1<<32 - 2, 1<<32 - 9, 1<<32 - 10} {
			for _, multiplier := range []uint8{1, 3, 255} {
				edge := 3 * int64(multiplier)
				for _, offset := range []int64{-1 << 31, -edge, -1, 0, 1, 2, edge - 1, edge, edge + 1, 1 << 31} {
					m := keyed(kind, key)
					p := down
					p.Multiplier = multiplier
					m.Receive(from(kind, key, last, p), neighbor, epoch)
					want := offset >= 0 && offset <= edge
					if kind == MeticulousMD5 || kind == MeticulousSHA1 {
						want = offset >= 1 && offset <= edge
					}
					next := uint32((int64(last) + offset + 1<<32) % (1 << 32))
					drop := m.Receive(from(kind, key, next, p), neighbor, epoch.Add(time.Second))
					if want != (drop == Accepted) || !want && drop != AuthSequence {
						t.Errorf("type %d, multiplier %d: %d after %d: %s", kind, multiplier, next, last, drop)
					}
				}
			}
		}
	}
}

// TestAuthSeqKnown checks that the last sequence number counts for twice the detection time after the last accepted
// packet, discarded ones not counting: so a neighbor that has restarted is accepted then, and an attacker who repeats
// its old packets cannot shut it out.
func TestAuthSeqKnown(t *testing.T) {
	key := Key{1, "k"}
	for _, kind := range kinds {
		for _, s := range []State{Down, Up} {
			for _, noise := range []bool{false, true} {
				m := keyed(kind, key)
				p := down
				if s == Up {
					p.State, p.YourDiscr = Init, 1
				}
				m.Receive(from(kind, key, 1000, p), neighbor, epoch)
				end := epoch.Add(2 * m.DetectionTime()) // 2 * 3 * 1 s
				restarted := down
				restarted.MyDiscr = 9
				for at := epoch.Add(time.Second); at.Before(end); at = at.Add(time.Second) {
					m.Advance(at)
					if noise {
						m.Receive(from(kind, key, 999, p), neighbor, at)
					}
					if drop := m.Receive(from(kind, key, 5, restarted), neighbor, at); drop == Accepted {
						t.Fatalf("type %d: accepted after %v", kind, at.Sub(epoch))
					}
				}
				if drop := m.Receive(from(kind, key, 5, restarted), neighbor, end.Add(-1)); drop != AuthSequence {
					t.Errorf("type %d: %s shortly before the end", kind, drop)
				}
				if drop := m.Receive(from(kind, key, 5, restarted), neighbor, end); drop != Accepted || m.state != Init {
					t.Errorf("type %d: %s after twice the detection time, state %s", kind, drop, m.state)
				}
			}
		}
	}
}

// exchange passes all packets of two machines to each other for a time, and returns those of the second one.
func exchange(ends [2]*Machine, now *time.Time, d time.Duration) (sent []Packet) {
	for end := now.Add(d); now.Before(end); *now = now.Add(10 * time.Millisecond) {
		for i, m := range ends {
			m.Advance(*now)
			for p, ok := m.Output(*now); ok; p, ok = m.Output(*now) {
				ends[1-i].Receive(p, neighbor, *now)
				if i == 1 {
					sent = append(sent, p)
				}
			}
		}
	}
	return sent
}

func couple(kind AuthType, a, b []Key) [2]*Machine {
	var ends [2]*Machine
	for i, keys := range [][]Key{a, b} {
		ends[i] = NewMachine(MachineConfig{Discriminator: uint32(1 + i), Interval: 100 * time.Millisecond, Multiplier: 3, Random: rand.Int64N, Auth: Auth{kind, keys}})
	}
	return ends
}

// TestReplay checks that recorded packets of the neighbor are discarded: meticulous all of them, otherwise all but
// those with the last number, and that they neither keep a session up nor change it.
func TestReplay(t *testing.T) {
	keys := []Key{{1, "k"}}
	for _, kind := range kinds {
		ends, now := couple(kind, keys, keys), epoch
		sent := exchange(ends, &now, 20*time.Second)
		m := ends[0]
		if m.state != Up || len(sent) < 150 {
			t.Fatalf("type %d: %s after %d packets", kind, m.state, len(sent))
		}
		last, before := sent[len(sent)-1].Auth.Sequence, *m
		repeated := 0
		for _, p := range sent {
			drop := m.Receive(p, neighbor, now)
			switch {
			case !kind.meticulous() && p.Auth.Sequence == last:
				if repeated++; drop != Accepted {
					t.Errorf("type %d: %s for the last number", kind, drop)
				}
			case drop != AuthSequence:
				t.Errorf("type %d: %s for number %d, the last one is %d", kind, drop, p.Auth.Sequence, last)
			}
		}
		if m.Status() != before.Status() || kind.meticulous() && m.lastReceived != before.lastReceived {
			t.Errorf("type %d: %+v became %+v", kind, before.Status(), m.Status())
		}
		if repeated > 14 { // a second, at 75 ms
			t.Errorf("type %d: %d packets have the last number", kind, repeated)
		}
		// The neighbor is silent. Whatever an attacker repeats, the session goes down, meticulous within the detection
		// time.
		if kind.meticulous() {
			end := m.lastReceived.Add(m.DetectionTime())
			for at := now; at.Before(end); at = at.Add(10 * time.Millisecond) {
				m.Receive(sent[rand.IntN(len(sent))], neighbor, at)
			}
			m.Advance(end)
			if m.state != Down || m.diag != DetectionTimeExpired {
				t.Errorf("type %d: %+v", kind, m.Status())
			}
		}
	}
}

// TestWrongKey checks that two ends with different keys, IDs or types never come up.
func TestWrongKey(t *testing.T) {
	for _, kind := range kinds {
		for name, keys := range map[string][2][]Key{
			"key": {{{1, "k"}}, {{1, "K"}}}, "ID": {{{1, "k"}}, {{2, "k"}}}, "longer key": {{{1, "k"}}, {{1, "kk"}}},
		} {
			ends, now := couple(kind, keys[0], keys[1]), epoch
			exchange(ends, &now, 10*time.Minute)
			if ends[0].state != Down || ends[1].state != Down {
				t.Errorf("type %d, another %s: %s and %s", kind, name, ends[0].state, ends[1].state)
			}
		}
		ends, now := couple(kind, []Key{{1, "k"}}, []Key{{1, "k"}}), epoch
		ends[1] = NewMachine(MachineConfig{Discriminator: 2, Interval: 100 * time.Millisecond, Multiplier: 3, Random: none})
		exchange(ends, &now, time.Minute)
		if ends[0].state != Down || ends[1].state != Down {
			t.Errorf("type %d, one end without: %s and %s", kind, ends[0].state, ends[1].state)
		}
	}
}

// TestSequenceSent checks the transmitted sequence numbers: random at first; meticulous each one higher, also from
// 2^32-1 to 0; otherwise higher when the contents change, and at least once per second.
func TestSequenceSent(t *testing.T) {
	for _, kind := range kinds {
		m := NewMachine(MachineConfig{Discriminator: 1, Interval: 100 * time.Millisecond, Multiplier: 3,
			Random: func(n int64) int64 { return n - 1 - n/(1<<20) }, Auth: Auth{kind, []Key{{1, "k"}}}})
		m.auth.sent = 1<<32 - 100
		now := epoch
		var last Packet
		lastNew := now
		numbers := 0
		next := func() {
			t.Helper()
			p, ok := m.Output(now)
			if !ok {
				t.Fatalf("type %d: nothing to send at %v", kind, now.Sub(epoch))
			}
			step := p.Auth.Sequence - last.Auth.Sequence
			bare, lastBare := p, last
			bare.Auth, lastBare.Auth = Section{}, Section{}
			switch {
			case last.Auth.Length == 0:
			case step > 1 || kind.meticulous() && step != 1:
				t.Fatalf("type %d: %d after %d", kind, p.Auth.Sequence, last.Auth.Sequence)
			case bare != lastBare && step != 1:
				t.Errorf("type %d: contents changed, number %d did not", kind, p.Auth.Sequence)
			case step == 0 && now.Sub(lastNew) >= time.Second:
				t.Errorf("type %d: number %d for %v", kind, p.Auth.Sequence, now.Sub(lastNew))
			case !kind.meticulous() && bare == lastBare && step == 1 && now.Sub(lastNew) < time.Second:
				t.Errorf("type %d: number %d although nothing changed", kind, p.Auth.Sequence)
			}
			if step != 0 {
				numbers++
				lastNew = now
			}
			last = p
		}
		next()
		peer := from(kind, Key{1, "k"}, 1, Packet{State: Init, Multiplier: 255, MyDiscr: 2, YourDiscr: 1, DesiredMinTx: time.Hour, RequiredMinRx: time.Millisecond})
		if drop := m.Receive(peer, neighbor, now); drop != Accepted {
			t.Fatal(drop)
		}
		for i := range 3000 {
			if now = m.Next(); now.Before(epoch) {
				now = lastNew
			}
			next()
			if i%500 == 0 {
				p := Packet{State: Up, Poll: true, Final: i == 0, Multiplier: 255, MyDiscr: 2, YourDiscr: 1, DesiredMinTx: time.Hour, RequiredMinRx: time.Millisecond}
				if drop := m.Receive(from(kind, Key{1, "k"}, uint32(2+i/500), p), neighbor, now); drop != Accepted {
					t.Fatal(drop)
				}
			}
		}
		if kind.meticulous() && numbers < 3000 || !kind.meticulous() && numbers > 300 || last.Auth.Sequence > 3000 {
			t.Errorf("type %d: %d numbers, the last is %d", kind, numbers, last.Auth.Sequence)
		}
	}
	seen := map[uint32]bool{}
	for range 20 {
		m := NewMachine(MachineConfig{Discriminator: 1, Interval: time.Second, Multiplier: 3, Random: rand.Int64N, Auth: Auth{KeyedSHA1, []Key{{1, "k"}}}})
		p, _ := m.Output(epoch)
		seen[p.Auth.Sequence] = true
	}
	if len(seen) < 15 {
		t.Errorf("20 sessions began with %d numbers", len(seen))
	}
}

// TestAuthPackets compares sent packets with octets that another implementation has made: Python's hashlib.
func TestAuthPackets(t *testing.T) {
	for kind, want := range map[AuthType]string{
		KeyedMD5:       "204403300000000100000000000f4240000186a0000000000218c80001020304f85ab2d41eedcecf7695a7618614ffef",
		MeticulousMD5:  "204403300000000100000000000f4240000186a0000000000318c80001020304faa9dafe9af2be8a139f60249d0cc38b",
		KeyedSHA1:      "204403340000000100000000000f4240000186a000000000041cc800010203044442cba17276cda2fa03ec4aa91bcd69e4cfc132",
		MeticulousSHA1: "204403340000000100000000000f4240000186a000000000051cc800010203048bec7b89e401a9e2e28f3171bd401892a25a7a58",
	} {
		const secret = "correct horse ba"
		m := keyed(kind, Key{200, secret}, Key{1, "not used"})
		m.auth.sent = 0x01020303
		p, ok := m.Output(epoch)
		if got := hex.EncodeToString(p.AppendTo(nil)); !ok || got != want {
			t.Errorf("type %d: %s, want %s", kind, got, want)
		}
	}
}

// TestKeyRotation checks that keys change without an interruption in the documented order: the new key is added at both
// ends, then signs, and then the old one is removed. Without that order, the session goes down.
func TestKeyRotation(t *testing.T) {
	before, after := Key{1, "before"}, Key{2, "after"}
	for _, kind := range kinds {
		ends, now := couple(kind, []Key{before}, []Key{before}), epoch
		exchange(ends, &now, 20*time.Second)
		for step, keys := range [][]Key{{before, after}, {after, before}, {after}} {
			for i := range ends {
				ends[i].SetKeys(keys)
				sent := exchange(ends, &now, 5*time.Second)
				if ends[0].state != Up || ends[1].state != Up {
					t.Fatalf("type %d, step %d, end %d: %s and %s", kind, step, i, ends[0].state, ends[1].state)
				}
				if want := keys[0].ID; i == 1 && sent[len(sent)-1].Auth.KeyID != want {
					t.Errorf("type %d, step %d: signed by %d, want %d", kind, step, sent[len(sent)-1].Auth.KeyID, want)
				}
			}
		}
		ends[0].SetKeys([]Key{before})
		exchange(ends, &now, 5*time.Second)
		if ends[0].state == Up || ends[1].state == Up {
			t.Errorf("type %d: %s and %s with different keys", kind, ends[0].state, ends[1].state)
		}
	}
}

// TestAuthSessions checks sessions with sockets: equal keys come up, a wrong key stays down with the reason in the
// counters of both ends, and SetKeys repairs it.
func TestAuthSessions(t *testing.T) {
	for _, kind := range kinds {
		here, there := host(), host()
		t.Run(fmt.Sprintf("type %d", kind), func(t *testing.T) {
			t.Parallel() // sessions that are not up send one packet per second
			r := NewResponder(nil)
			var counters [2]Counters
			config := func(c Config, counters *Counters, secret string) Config {
				c.Auth, c.Counters = Auth{kind, []Key{{1, secret}}}, counters
				return c
			}
			a, _ := start(t, r, config(patient.between(here, there), &counters[0], "one"))
			b, _ := start(t, r, config(patient.between(there, here), &counters[1], "another"))
			netnstest.Eventually(t, within, func() error {
				if x, y := counters[0].Dropped(AuthDigest), counters[1].Dropped(AuthDigest); x < 2 || y < 2 {
					return fmt.Errorf("%d and %d packets discarded", x, y)
				}
				return nil
			})
			if x, y := a.Status().State, b.Status().State; x != Down || y != Down {
				t.Errorf("%s and %s with different keys", x, y)
			}
			for _, bad := range [][]Key{nil, {{1, ""}}, {{1, strings.Repeat("k", 21)}}, {{1, "k"}, {1, "l"}}} {
				if err := b.SetKeys(bad); err == nil {
					t.Errorf("keys %v were accepted", bad)
				}
			}
			if err := b.SetKeys([]Key{{1, "one"}}); err != nil {
				t.Fatal(err)
			}
			until(t, a, Up)
			until(t, b, Up)
			a.Close()
			until(t, b, Down) // AdminDown is signed too
			if st := b.Status(); st.RemoteState != AdminDown {
				t.Errorf("b shows %+v", st)
			}
		})
	}
}

// TestAuthRefused checks that Start refuses an invalid configuration, and that no error contains a secret.
func TestAuthRefused(t *testing.T) {
	r := NewResponder(nil)
	for name, auth := range map[string]Auth{
		"simple password":     {1, []Key{{1, "secret"}}},
		"type 6":              {6, []Key{{1, "secret"}}},
		"no type":             {0, []Key{{1, "secret"}}},
		"no key":              {Type: KeyedMD5},
		"empty key":           {KeyedMD5, []Key{{1, "secret"}, {2, ""}}},
		"17 octets for MD5":   {MeticulousMD5, []Key{{1, "secret" + strings.Repeat("k", 11)}}},
		"21 octets for SHA1":  {MeticulousSHA1, []Key{{1, "secret" + strings.Repeat("k", 15)}}},
		"one ID for two keys": {KeyedSHA1, []Key{{1, "secret"}, {2, "b"}, {1, "c"}}},
		"type 14":             {14, []Key{{1, "secret"}}},
	} {
		c := patient.between(host(), host())
		c.Auth = auth
		s, err := r.Start(c)
		if err == nil {
			s.Close()
			t.Errorf("%s: started", name)
		} else if t.Logf("%s: %v", name, err); strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: the error shows a key", name)
		}
	}
	if shown := fmt.Sprintf("%v %+v", Auth{KeyedMD5, []Key{{1, "secret"}}}, Key{1, "secret"}); strings.Contains(shown, "secret") {
		t.Errorf("shown as %s", shown)
	}
	for _, kind := range kinds {
		n := map[bool]int{true: 16, false: 20}[kind == KeyedMD5 || kind == MeticulousMD5]
		if err := (Auth{kind, []Key{{0, "k"}, {255, strings.Repeat("k", n)}}}).Validate(); err != nil {
			t.Errorf("type %d: %v", kind, err)
		}
	}
}
