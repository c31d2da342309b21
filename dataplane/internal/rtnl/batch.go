package rtnl

import (
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"
)

// Flags of SetNexthop and SetRoute.
const (
	// Create makes the object; an existing nexthop with this id is an error (EEXIST), an existing route with this prefix,
	// table and metric too.
	Create = unix.NLM_F_CREATE | unix.NLM_F_EXCL
	// Replace changes the object in place, or makes it.
	Replace = unix.NLM_F_CREATE | unix.NLM_F_REPLACE
	// Change changes an object that exists; none is an error (ENOENT).
	Change = unix.NLM_F_REPLACE
)

// Batch gathers messages that the kernel carries out in order. One that fails does not keep the others from being
// carried out.
type Batch struct {
	writer
	starts []int // of the messages in buf
}

// Begin returns an empty batch.
func (c *Conn) Begin() *Batch {
	b := &Batch{writer: writer{c.spare[:0]}, starts: c.starts[:0]}
	c.spare, c.starts = nil, nil
	return b
}

// Len is the number of messages.
func (b *Batch) Len() int { return len(b.starts) }

func (b *Batch) start() { b.starts = append(b.starts, len(b.buf)) }

// SetNexthop adds a nexthop object or group; flags are Create, Replace or Change. Replacing a group deals its buckets
// among the new members at once.
func (b *Batch) SetNexthop(n Nexthop, flags uint16) {
	b.start()
	b.setNexthop(n, flags)
}

// DelNexthop removes a nexthop object. The kernel takes it out of every group, and routes with it away.
func (b *Batch) DelNexthop(id uint32) {
	b.start()
	b.delNexthop(id)
}

// SetRoute adds a route; flags are Create, Replace or Change.
func (b *Batch) SetRoute(r Route, flags uint16) {
	b.start()
	b.route(unix.RTM_NEWROUTE, flags, r)
}

// DelRoute removes the route to a prefix in a table that has the metric, protocol, nexthop and type of r, those that are
// not 0.
func (b *Batch) DelRoute(r Route) {
	b.start()
	b.route(unix.RTM_DELROUTE, 0, r)
}

// SetRule adds a rule; one that is exactly equal is an error (EEXIST).
func (b *Batch) SetRule(r Rule) {
	b.start()
	b.rule(unix.RTM_NEWRULE, Create, r)
}

// DelRule removes the first rule that matches what is set in r.
func (b *Batch) DelRule(r Rule) {
	b.start()
	b.rule(unix.RTM_DELRULE, 0, r)
}

// describe says what message i wants, for errors.
func (b *Batch) describe(i int) string {
	m := b.buf[b.starts[i]:]
	kind, flags, body := binary.NativeEndian.Uint16(m[4:]), binary.NativeEndian.Uint16(m[6:]), m[headerSize:binary.NativeEndian.Uint32(m)]
	verb := "set"
	switch {
	case kind == unix.RTM_DELNEXTHOP || kind == unix.RTM_DELROUTE || kind == unix.RTM_DELRULE:
		verb = "delete"
	case flags&unix.NLM_F_EXCL != 0:
		verb = "add"
	}
	switch kind {
	case unix.RTM_NEWNEXTHOP:
		n, _ := parseNexthop(body)
		return fmt.Sprintf("%s %v", verb, n)
	case unix.RTM_DELNEXTHOP:
		n, _ := parseNexthop(body)
		return fmt.Sprintf("%s nexthop %d", verb, n.ID)
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		r, _ := parseRoute(body)
		return fmt.Sprintf("%s %v", verb, r)
	default:
		r, _ := parseRule(body)
		return fmt.Sprintf("%s %v", verb, r)
	}
}

// Do carries a batch out and returns one result for each message: nil means that the kernel has done it. When the socket
// itself fails, or answers were lost (ErrOverrun), all messages whose fate is not known get that error. The batch is empty
// afterwards.
func (c *Conn) Do(b *Batch) []error {
	results := make([]error, b.Len())
	if c.refuse != nil {
		for i := range results {
			if errno := c.refuse(); errno != 0 {
				results[i] = &Error{b.describe(i), errno, ""}
				binary.NativeEndian.PutUint16(b.buf[b.starts[i]+4:], unix.NLMSG_NOOP)
			}
		}
	}
	for first := 0; first < b.Len(); {
		last := c.piece(b, first)
		if err := c.exchange(b, first, last, results); err != nil {
			for i := first; i < b.Len(); i++ {
				if results[i] == nil {
					results[i] = fmt.Errorf("%s: %w", b.describe(i), err)
				}
			}
			break
		}
		first = last
	}
	c.spare, c.starts = b.buf[:0], b.starts[:0]
	*b = Batch{}
	return results
}

// piece returns the end of the messages from first on that one sendmsg may carry: their size, and the room for all of their
// answers, should every one of them fail.
func (c *Conn) piece(b *Batch, first int) int {
	last := first + 1
	for last < b.Len() && last-first < c.window && c.end(b, last)-b.starts[first] <= pieceSize {
		last++
	}
	return last
}

// end is where message i of a batch ends.
func (c *Conn) end(b *Batch, i int) int {
	if i+1 < b.Len() {
		return b.starts[i+1]
	}
	return len(b.buf)
}

// exchange sends messages first to last and reads until the last is answered.
func (c *Conn) exchange(b *Batch, first, last int, results []error) error {
	base := c.sequence + 1
	for i := first; i < last; i++ {
		c.sequence++
		binary.NativeEndian.PutUint32(b.buf[b.starts[i]+8:], c.sequence)
	}
	flags := b.buf[b.starts[last-1]+6:]
	binary.NativeEndian.PutUint16(flags, binary.NativeEndian.Uint16(flags)|unix.NLM_F_ACK)
	if err := c.send(b.buf[b.starts[first]:c.end(b, last-1)]); err != nil {
		return err
	}
	for done := false; !done; {
		err := c.receive(func(m message) bool {
			i := int(m.sequence - base)
			if m.kind != unix.NLMSG_ERROR || m.sequence < base && base-m.sequence < 1<<31 || i >= last-first {
				return true // of an exchange that was given up
			}
			if errno, text := parseError(m); errno != 0 {
				results[first+i] = &Error{b.describe(first + i), errno, text}
			}
			done = i == last-first-1
			return true
		})
		if err != nil {
			return err
		}
	}
	return nil
}
