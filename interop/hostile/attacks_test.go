package hostile

import (
	"encoding/binary"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"time"
)

// attack is what the hostile leaf does.
type attack struct {
	name string
	// destinations is the number of destinations that the honest leaves announce; 0 means few.
	destinations int
	// held is the number of routes that the hostile leaf may hold in a session.
	held int
	// longer multiplies the duration of an attack with one message for each connection; 0 counts as 1. On a quiet
	// machine all messages are sent.
	longer int
	run    func(*attacker)
}

const (
	few    = 64
	flood  = 16000
	bursts = 500 * time.Millisecond // pause between bursts
)

// attacks are all attacks. docs/security.md has the result of each.
var attacks = []attack{
	{name: "bad headers before OPEN", longer: 3, run: kill(false, headers)},
	{name: "bad headers", run: kill(true, headers)},
	{name: "messages before OPEN", longer: 3, run: kill(false, malformed)},
	{name: "malformed UPDATEs", longer: 3, run: kill(true, malformed)},
	{name: "hostile OPENs", longer: 3, run: kill(false, opens)},
	{name: "NOTIFICATIONs", run: notifications},
	{name: "mutants of UPDATEs", held: 1000, run: mutants},
	{name: "distinct bandwidths at once", destinations: flood, held: flood, run: rounds(bursts, func(w *wire, round int) []byte {
		return distinct(w.plane, 2*round)
	})},
	{name: "distinct bandwidths, alternating", destinations: flood, held: flood, run: rounds(0, func(w *wire, round int) []byte {
		return distinct(w.plane, round%2)
	})},
	{name: "more prefixes than permitted", held: flood, run: storm(func(w *wire, i int) []byte {
		return update(well(w.plane, full), destination(8*i), destination(8*i+1), destination(8*i+2), destination(8*i+3), destination(8*i+4), destination(8*i+5),
			destination(8*i+6), destination(8*i+7))
	})},
	{name: "End-of-RIB storm", run: repeat(endOfRIB)},
	{name: "ROUTE-REFRESH storm", run: repeat(refresh)},
	{name: "KEEPALIVE storm", run: repeat(keepalive)},
	{name: "attribute bombs", held: 4000, run: storm(func(w *wire, i int) []byte { return bomb(w.plane, i%4000, 3900) })},
	{name: "attributes of 20 KiB", run: largeBombs},
	{name: "withdrawals of unknown routes", run: storm(func(_ *wire, i int) []byte {
		return withdraw(destination(1<<17+i), destination(1<<18+i), destination(1<<19+i), destination(1<<20+i))
	})},
	{name: "announcements and withdrawals", destinations: 1000, held: 1000, run: storm(func(w *wire, i int) []byte {
		if i/1000%2 == 0 {
			return update(well(w.plane, full), destination(i%1000))
		}
		return withdraw(destination(i % 1000))
	})},
	{name: "sessions that end at once", destinations: 1000, held: 1000, run: func(a *attacker) {
		a.established(func(w *wire, i int) {
			_, _ = w.Write(join(1000, func(d int) []byte { return update(well(w.plane, float32(full/(1+i%3))), destination(d)) })) // the next session follows
			if i%2 == 0 {
				_ = w.SetLinger(0) // a RST in place of a FIN
			}
		})
	}},
	{name: "connections that end at once", run: func(a *attacker) {
		a.each(func(w *wire, i int) {
			b := slices.Concat(open(w.plane), keepalive)
			_, _ = w.Write(b[:i%(len(b)+1)]) // the next connection follows
		})
	}},
	{name: "nothing is read", held: 4000, run: unread},
	{name: "one octet at a time", run: slowLoris},
	{name: "half-open connections", run: halfOpen},
	{name: "AS paths of 255 hops and more", held: 2000, run: storm(func(w *wire, i int) []byte {
		return update(slices.Concat(origin, longPath(w.plane, 250+i%500), nextHop(leafAddress(w.plane).As4()), bandwidth(full)), destination(i%1000))
	})},
	{name: "wrong next hops", held: 2000, run: storm(func(w *wire, i int) []byte {
		hops := [][4]byte{{}, {127, 0, 0, 1}, {255, 255, 255, 255}, {224, 0, 0, 1}, serverAddress(w.plane).As4(), leafAddress(prober).As4(), {10, 255, 0, 1}}
		return update(slices.Concat(origin, path(uint32(leafAS(w.plane)), originAS), nextHop(hops[i%len(hops)]), bandwidth(full)), destination(i%1000))
	})},
	{name: "refused routes and aggregates", held: 2000, run: storm(func(w *wire, i int) []byte {
		aggregate := binary.BigEndian.AppendUint32([]byte{24}, firstDestination+uint32(i)<<8%(1<<16))[:4]
		loop := slices.Concat(origin, path(uint32(leafAS(w.plane)), serverAS), nextHop(leafAddress(w.plane).As4()))
		switch i % 4 {
		case 0:
			return update(well(w.plane, full), aggregate)
		case 1:
			return update(loop, destination(i))
		case 2:
			return withdraw(destination(i-1), aggregate)
		}
		return update(slices.Concat(origin, path(uint32(leafAS(w.plane)), originAS), nextHop([4]byte{10, 255, 0, 1})), destination(i))
	})},
	{name: "impossible bandwidths", destinations: 1000, held: 1000, run: storm(func(w *wire, i int) []byte {
		bits := []uint32{0x7fc00000, 0x7f800001, 0xffffffff, math.Float32bits(1e38), math.Float32bits(-1), math.Float32bits(float32(math.Inf(1))),
			math.Float32bits(float32(math.Inf(-1))), 0x80000000, 1, 0x7f7fffff}
		return update(slices.Concat(origin, path(uint32(leafAS(w.plane)), originAS), nextHop(leafAddress(w.plane).As4()), bandwidthBits(bits[i%len(bits)])),
			destination(i/len(bits)%1000))
	})},
}

// headers returns messages whose header is wrong (RFC 4271, Section 6.1).
func headers(int) (all [][]byte) {
	for _, length := range []int{0, 1, 18, 4097, 65535} {
		all = append(all, withLength(keepalive, length))
	}
	all = append(all, withLength(message(kindUpdate, make([]byte, 20)...), 22), withLength(message(kindOpen, make([]byte, 40)...), 28), withLength(message(kindNotification, 6), 20),
		message(kindKeepalive, 0), message(kindUpdate))
	for i := range 16 {
		b := slices.Clone(keepalive)
		b[i] = 0
		all = append(all, b)
	}
	return all
}

// malformed returns messages with one fault each, which speakers of BGP refuse by an error or ignore. None of them ends
// other software: what is known to do so does not belong here. Random faults are those of mutants, which only the
// binary under test receives.
func malformed(p int) [][]byte {
	hop := nextHop(leafAddress(p).As4())
	good := well(p, full)
	at := destination(0)
	raw := func(body ...byte) []byte { return message(kindUpdate, body...) }
	return [][]byte{
		raw(0, 0, 0, 0, 33, 1, 2, 3, 4),       // the length of a prefix
		update(slices.Concat(good, good), at), // every attribute twice
		update(slices.Concat(good, origin), at),
		update(slices.Concat(origin, origin, path(uint32(leafAS(p))), hop), at),
		update(origin, at), update(path(1), at), update(nil, at), // missing attributes
		update(slices.Concat(attribute(0x40, 1, 9), path(uint32(leafAS(p))), hop), at),
		update(slices.Concat(attribute(0xc0, 1, 0), path(uint32(leafAS(p))), hop), at), // flags
		update(slices.Concat(origin, attribute(0x40, 2, 2, 255, 0, 0), hop), at),       // a segment beyond the attribute
		update(slices.Concat(origin, attribute(0x40, 2, 9, 1, 0, 0, 0, 1), hop), at),
		update(slices.Concat(origin, path(0), hop), at),
		update(slices.Concat(origin, path(serverAS), hop), at),
		update(slices.Concat(good, attribute(0x80, 4, 1)), at),                                       // MED of one octet
		update(slices.Concat(good, attribute(0xc0, 8, 1, 2, 3)), at),                                 // communities
		update(slices.Concat(good, attribute(0xc0, 16, 0, 4, 1)), at),                                // extended communities
		update(slices.Concat(good, attribute(0xc0, 32, 1)), at),                                      // large communities
		update(slices.Concat(good, attribute(0xc0, 17, 2, 1, 0, 0, 0xfd, 0xea)), at),                 // AS4_PATH
		update(slices.Concat(good, attribute(0xc0, 99, 1, 2, 3)), at),                                // unknown
		update(slices.Concat(good, attribute(0x80, 99)), at),                                         //
		update(slices.Concat(origin, path(1), attribute(0x80, 14, 0))),                               // MP_REACH of one octet
		update(slices.Concat(origin, path(1), attribute(0x80, 14, 0, 1, 1, 255, 0))),                 // a next hop beyond it
		update(slices.Concat(origin, path(1), attribute(0x80, 14, 0, 2, 1, 16, 0, 0))),               //
		update(slices.Concat(origin, path(1), attribute(0x80, 14, 0, 1, 2, 4, 172, 16, 0, 1, 0, 0))), // multicast
		update(attribute(0x80, 15, 0)), update(attribute(0x80, 15, 0, 1, 2, 8, 10)),                  // MP_UNREACH
		message(kindRefresh), message(kindRefresh, 0, 1, 0), message(kindRefresh, 0xff, 0xff, 3, 0xff), message(kindRefresh, 0, 1, 0, 1, 0x80, 0xff, 0xff),
		message(kindNotification), message(kindNotification, 6), message(kindNotification, 6, 2, 255, 'x'), message(kindNotification, 0, 0),
		message(kindKeepalive, 1),
	}
}

// opens returns OPENs with a fault, or with unusual capabilities, each followed by a KEEPALIVE.
func opens(p int) (all [][]byte) {
	for _, parameters := range [][]byte{
		{0xff}, {2}, {2, 255}, {2, 1, 1}, {2, 2, 1, 255}, {9, 0}, {1, 0}, // cut off, authentication
		parameter(65, 4, 0, 0, 0, 0), parameter(65, 4, 0xff, 0xff, 0xff, 0xff), // AS numbers of four octets
		parameter(64, 2, 0x80, 0), parameter(69, 4, 0, 1, 1, 3), parameter(69, 4, 0xff, 0xff, 0xff, 0xff), // graceful restart, ADD-PATH
		parameter(5, 6, 0, 1, 0, 1, 0, 9), parameter(7, 1, 0), parameter(9, 3, 1, 2, 3), // extended next hop, others
		slices.Repeat([]byte{2, 2, 2, 0}, 63),                    // one capability 63 times
		slices.Repeat([]byte{2, 6, 65, 4, 0, 0, 0xfc, 0x5c}, 31), // an AS number 31 times
		parameter(slices.Repeat([]byte{1, 4, 0xff, 0xff, 0, 0xff}, 42)...),
	} {
		all = append(all, slices.Concat(open(p, parameters...), keepalive))
	}
	for _, change := range []struct {
		at    int
		value byte
	}{{19, 3}, {19, 5}, {20, 0}, {22, 0}, {23, 1}, {24, 0}, {24, 224}, {28, 0}, {28, 255}} { // version, AS, hold time, identifier, length
		b := slices.Clone(open(p))
		b[change.at] = change.value
		if change.at == 22 {
			b[23] = 2 // a hold time of two seconds
		}
		all = append(all, slices.Concat(b, keepalive))
	}
	return append(all, slices.Concat(open(p), endOfRIB), slices.Concat(open(p), refresh), slices.Concat(open(p), message(kindNotification, 2, 7)))
}

// notifications ends connections by NOTIFICATIONs: before the OPEN, between OPEN and KEEPALIVE, and many at once in a
// session.
func notifications(a *attacker) {
	a.each(func(w *wire, i int) {
		text := append([]byte{6, byte(2 + i%9), 255}, slices.Repeat([]byte("\x1b[2J\n"), 60)...)
		one := message(kindNotification, text...)
		switch i % 4 {
		case 0:
			_, _ = w.Write(one) // the next connection follows
		case 1:
			_, _ = w.Write(append(open(w.plane), one...))
		default:
			if w.establish() {
				_, _ = w.Write(slices.Repeat(one, 1000))
			}
		}
		w.discard(answer)
	})
}

// distinct returns the announcements of a flood: every route of a round has another bandwidth than all others.
func distinct(plane, round int) []byte {
	return join(flood, func(i int) []byte {
		return update(well(plane, float32(1e9+float64(2*i+round%2)*1e6)/8*40), destination(i))
	})
}

// bomb returns an announcement with attributes of a size in total.
func bomb(plane, i, size int) []byte {
	value := slices.Concat(well(plane, full))
	for kind := byte(100); len(value) < size; kind++ {
		value = append(value, attribute(0xc0, kind, slices.Repeat([]byte{byte(i), byte(i >> 8), kind}, min(1200, size-len(value))/3+1)...)...)
	}
	if room := maxLen - headerLen - 4 - 5; size <= room {
		value = value[:min(len(value), room)]
		// The last attribute must end with the message.
		return update(trim(value), destination(i))
	}
	return update(value, destination(i))
}

// trim shortens the last attribute to the end of b.
func trim(b []byte) []byte {
	for at := 0; at < len(b); {
		n, value := int(b[min(at+2, len(b)-1)]), at+3
		if b[at]&0x10 != 0 && at+4 <= len(b) {
			n, value = int(b[at+2])<<8|int(b[at+3]), at+4
		}
		if value+n >= len(b) {
			if value > len(b) {
				return b[:at]
			}
			if b[at]&0x10 != 0 {
				binary.BigEndian.PutUint16(b[at+2:], uint16(len(b)-value))
			} else {
				b[at+2] = byte(len(b) - value)
			}
			return b
		}
		at = value + n
	}
	return b
}

// largeBombs sends routes with 20 KiB of attributes: with the extended messages of RFC 8654, which the leaf claims, and
// cut into UPDATEs that are as long as messages may be.
func largeBombs(a *attacker) {
	a.each(func(w *wire, i int) {
		as := leafAS(w.plane)
		if shake(w, open(w.plane, parameter(1, 4, 0, 1, 0, 1, 6, 0, 65, 4, 0, 0, byte(as>>8), byte(as))...)) != nil {
			return
		}
		a.sessions.Add(1)
		if i%2 == 0 {
			_, _ = w.Write(bomb(w.plane, i, 20<<10))
			w.discard(answer)
			return
		}
		for d := 0; a.ctx.Err() == nil && d < 1000; d++ {
			if _, err := w.Write(join(5, func(part int) []byte { return bomb(w.plane, d+part<<8, 4000) })); err != nil {
				return
			}
		}
	})
}

// mutants sends UPDATEs with random faults to the binary under test, and to no other program. Half of them keep the
// session up, and many of these routes count.
func mutants(a *attacker) {
	a.established(func(w *wire, i int) {
		r := rand.New(rand.NewPCG(uint64(w.plane), uint64(i)))
		a.wg.Go(func() { _, _ = io.Copy(io.Discard, w.TCPConn) })
		seeds := append(malformed(w.plane), update(well(w.plane, full), destination(1), destination(2)), withdraw(destination(1)), endOfRIB, keepalive, refresh)
		for a.ctx.Err() == nil {
			b := slices.Clone(seeds[r.IntN(len(seeds))])
			for range r.IntN(4) {
				switch at := headerLen + r.IntN(len(b)-headerLen+1); {
				case at < len(b) && r.IntN(2) == 0:
					b[at] ^= 1 << r.IntN(8)
				case r.IntN(2) == 0:
					b = slices.Insert(b, at, byte(r.Uint32()), byte(r.Uint32()))
				default:
					b = slices.Delete(b, at, min(len(b), at+r.IntN(8)))
				}
			}
			if _, err := w.Write(withLength(b, len(b))); err != nil {
				return
			}
		}
	})
}

// longPath returns an AS_PATH of n numbers, in segments.
func longPath(plane, n int) []byte {
	numbers := []uint32{uint32(leafAS(plane))}
	for i := 1; i < n; i++ {
		numbers = append(numbers, uint32(66000+i))
	}
	return path(numbers...)
}

// unread announces and requests routes, and never reads.
func unread(a *attacker) {
	a.established(func(w *wire, _ int) {
		_ = w.SetReadBuffer(1) // the receive window is full soon
		for i := 0; a.ctx.Err() == nil; i++ {
			if _, err := w.Write(slices.Concat(update(well(w.plane, float32(1e9*(1+i%50))), destination(i%4000)), slices.Repeat(refresh, 50))); err != nil {
				return
			}
		}
	})
}

// slowLoris sends valid messages octet by octet.
func slowLoris(a *attacker) {
	a.each(func(w *wire, i int) {
		_ = w.SetNoDelay(true)
		a.wg.Go(func() { _, _ = io.Copy(io.Discard, w.TCPConn) })
		b := slices.Concat(open(w.plane), keepalive, update(well(w.plane, full), destination(i)), endOfRIB)
		for {
			for at := range b {
				if _, err := w.Write(b[at : at+1]); err != nil {
					return
				}
				a.pause(time.Millisecond)
			}
			b = slices.Concat(keepalive, update(well(w.plane, full), destination(i)))
		}
	})
}

// halfOpen opens many connections and sends nothing, or a part of an OPEN.
func halfOpen(a *attacker) {
	a.wg.Go(func() {
		for {
			w := a.accept()
			if w == nil {
				return
			}
			a.wg.Go(func() {
				defer w.Close()
				<-a.ctx.Done()
			})
		}
	})
	for i := 0; a.ctx.Err() == nil; i++ {
		w := a.dial()
		if w == nil {
			break
		}
		_, _ = w.Write(open(passive)[:i%28]) // a connection that the server closes is replaced
		a.wg.Go(func() {
			defer w.Close()
			<-a.ctx.Done()
		})
		if i%50 == 49 {
			a.pause(20 * time.Millisecond)
		}
	}
	a.wg.Wait()
}
