package rtnl

import (
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"
)

// Flags of SetNexthop and SetRoute.
const (
	// Create creates the object. It is an error (EEXIST) if a nexthop with this id, or a route with this prefix, table
	// and metric, exists.
	Create = unix.NLM_F_CREATE | unix.NLM_F_EXCL
	// Replace changes the object in place, or creates it.
	Replace = unix.NLM_F_CREATE | unix.NLM_F_REPLACE
	// Change changes an existing object; it is an error (ENOENT) if the object does not exist.
	Change = unix.NLM_F_REPLACE
)

// Batch collects messages that the kernel executes in order. A failed message does not stop the execution of the
// following ones.
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

// Len returns the number of messages.
func (b *Batch) Len() int { return len(b.starts) }

func (b *Batch) start() { b.starts = append(b.starts, len(b.buf)) }

// SetNexthop sets a nexthop object or group; flags are Create, Replace or Change. If a group is replaced, its buckets
// are redistributed among the new members immediately.
func (b *Batch) SetNexthop(n Nexthop, flags uint16) {
	b.start()
	b.setNexthop(n, flags)
}

// DelNexthop deletes a nexthop object. The kernel removes it from every group, and deletes routes that use it.
func (b *Batch) DelNexthop(id uint32) {
	b.start()
	b.delNexthop(id)
}

// SetRoute sets a route; flags are Create, Replace or Change.
func (b *Batch) SetRoute(r Route, flags uint16) {
	b.start()
	b.route(unix.RTM_NEWROUTE, flags, r)
}

// SetPaths sets a route with its own next hops, of which it writes gateways, devices and OnLink. An IPv4 route may have
// IPv6 gateways (RFC 8950).
func (b *Batch) SetPaths(r Route, through []Nexthop, flags uint16) {
	b.start()
	b.route(unix.RTM_NEWROUTE, flags, r, through...)
}

// DelRoute deletes the route to a prefix in a table whose metric, protocol, nexthop and type equal those fields of r
// that are not 0.
func (b *Batch) DelRoute(r Route) {
	b.start()
	b.route(unix.RTM_DELROUTE, 0, r)
}

// SetRule adds a rule; it is an error (EEXIST) if an equal rule exists.
func (b *Batch) SetRule(r Rule) {
	b.start()
	b.rule(unix.RTM_NEWRULE, Create, r)
}

// DelRule deletes the first rule that matches the non-zero fields of r.
func (b *Batch) DelRule(r Rule) {
	b.start()
	b.rule(unix.RTM_DELRULE, 0, r)
}

// describe describes message i for errors.
func (b *Batch) describe(i int) string {
	m := b.buf[b.starts[i]:]
	kind, flags, body := binary.NativeEndian.Uint16(m[4:]), binary.NativeEndian.Uint16(m[6:]), m[headerSize:binary.NativeEndian.Uint32(m)]
	verb := "set"
	switch {
	case kind == unix.RTM_DELNEXTHOP || kind == unix.RTM_DELROUTE || kind == unix.RTM_DELRULE || kind == unix.RTM_DELLINKPROP:
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
	case unix.RTM_NEWLINKPROP, unix.RTM_DELLINKPROP:
		l, _ := parseLink(body)
		return fmt.Sprintf("%s alternative name %s of device #%d", verb, l.AltNames, l.Index)
	default:
		r, _ := parseRule(body)
		return fmt.Sprintf("%s %v", verb, r)
	}
}

// Do executes a batch and returns one result per message: nil means that the kernel has executed it. If the socket
// fails, or answers were lost (ErrOverrun), all messages with an unknown result get that error. The batch is empty
// afterwards.
func (c *Conn) Do(b *Batch) []error {
	results := make([]error, b.Len())
	if c.refuse != nil {
		for i := range results {
			what := b.describe(i)
			if errno := c.refuse(what); errno != 0 {
				results[i] = &Error{what, errno, ""}
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

// piece returns the end of the messages, starting at first, that fit into one sendmsg: limited by their size, and by
// receive buffer space for all answers if every message fails.
func (c *Conn) piece(b *Batch, first int) int {
	last := first + 1
	for last < b.Len() && last-first < c.window && c.end(b, last)-b.starts[first] <= pieceSize {
		last++
	}
	return last
}

// end returns the end of message i in the buffer of a batch.
func (c *Conn) end(b *Batch, i int) int {
	if i+1 < b.Len() {
		return b.starts[i+1]
	}
	return len(b.buf)
}

// exchange sends messages first to last-1 and reads answers until the last one is answered.
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
		err := c.receive(func(m Message) bool {
			i := int(m.Sequence - base)
			if m.Kind != unix.NLMSG_ERROR || m.Sequence < base && base-m.Sequence < 1<<31 || i >= last-first {
				return true // from an abandoned exchange
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
