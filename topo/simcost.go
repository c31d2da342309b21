package topo

import "github.com/fared/fared/fare"

// Cost is the cost of a change, over all sessions and servers of the fabric. The zero value means no cost.
type Cost struct {
	// Rounds is the number of message exchanges until no message is left: 1 if leaves notify servers, 3 if a leaf
	// notifies spines, these the leaves, and these the servers.
	Rounds int `json:"rounds"`
	// Updates is the number of UPDATE messages (RFC 4271, Section 4.3), including End-of-RIB; Bytes is their size in
	// octets, with the header and without TCP. OPEN and KEEPALIVE are not counted. GoBGP, as fared uses it, sends each
	// changed route in a separate message, but packs routes with equal attributes into one when a session comes up; FRR
	// and BIRD always pack them.
	Updates int `json:"updates"`
	Bytes   int `json:"bytes"`
	// Announced and Withdrawn count the routes in these messages: one for each loopback, session and message.
	Announced int `json:"announced"`
	Withdrawn int `json:"withdrawn"`
	// SubPorts is the number of servers' sub-ports that changed state. Each is one operation toward the server's data
	// plane, and a failure at the server itself requires no other.
	SubPorts int `json:"sub_ports"`
	// Pairs is the number of pairs of source groups (servers, or GPUs that own their ports) whose weights of planes or
	// sub-ports changed. Destinations is the number of affected remote GPUs, and Vectors the number of weight vectors
	// that a source group has now and did not have before, both summed over the source groups.
	Pairs        int `json:"pairs"`
	Destinations int `json:"destinations"`
	Vectors      int `json:"vectors"`
}

// compare counts the changes of weights. Both lists are in the order of network.pairs.
func (c *Cost) compare(n *network, before, after []string) {
	had, has := map[int]map[string]bool{}, map[int]map[string]bool{}
	note := func(sets map[int]map[string]bool, src int, vector string) {
		if sets[src] == nil {
			sets[src] = map[string]bool{}
		}
		sets[src][vector] = true
	}
	i := 0
	n.pairs(func(src, dst, count int) {
		note(had, src, before[i])
		note(has, src, after[i])
		if before[i] != after[i] {
			c.Pairs += count
			c.Destinations += count * n.fabric.groups[dst].GPUs
		}
		i++
	})
	for src, vectors := range has {
		for v := range vectors {
			if !had[src][v] {
				c.Vectors += n.classes[n.classOf[src/n.fabric.owners()]].size
			}
		}
	}
}

// Sizes of an UPDATE in octets (RFC 4271, Section 4.3): marker, length and type; the two lengths; ORIGIN; AS_PATH of
// one segment with four octets per AS (RFC 6793); NEXT_HOP; EXTENDED COMMUNITIES (RFC 4360) of eight octets each; a /32
// each.
const (
	maxMessage  = 4096
	emptyUpdate = 19 + 2 + 2
	originSize  = 3 + 1
	pathSize    = 3 + 2
	nextHopSize = 3 + 4
	communities = 3
	prefixSize  = 1 + 4
	endOfRIB    = emptyUpdate // RFC 4724, Section 2
)

// updateSize returns the size of an UPDATE that announces loopbacks with equal attributes. FRR writes the length of
// AS_PATH in two octets.
func updateSize(software string, attrs *fare.Attributes, prefixes int) int {
	size := emptyUpdate + originSize + pathSize + 4*len(attrs.ASPath) + nextHopSize + communities + 8*len(attrs.Communities) + prefixes*prefixSize
	if software == FRR {
		size++
	}
	return size
}

// withdrawals is the number of withdrawals that fit one message.
const withdrawals = (maxMessage - emptyUpdate) / prefixSize

// teller sends one round's messages on a session and counts them, for all sessions that this one represents.
type teller struct {
	n         *network
	from      *simNode
	session   *simSession
	withdrawn int // number of withdrawn loopbacks on each such session
}

// sessions returns the number of real sessions that this one represents.
func (t *teller) sessions() int {
	for _, sn := range []*simNode{t.from, t.session.peer.node} {
		if sn.dest >= 0 {
			return t.n.dests[sn.dest].receives
		}
	}
	return 1
}

// prefixes returns the numbers of servers that a destination represents and of their loopbacks; toward its own leaf a
// server represents itself alone.
func (t *teller) prefixes(dest int) (servers, each int) {
	d := &t.n.dests[dest]
	if t.from.dest >= 0 {
		return 1, d.group.GPUs
	}
	return d.stands, d.group.GPUs
}

func (t *teller) send(m message) {
	m.session = t.session.peer.session
	to := t.session.peer.node
	to.inbox = append(to.inbox, m)
}

// announce sends a route. With table it is part of the initial table of a new session.
func (t *teller) announce(dest int, attrs *fare.Attributes, table bool) {
	t.send(message{dest: dest, attrs: attrs})
	servers, each := t.prefixes(dest)
	messages := 1 // a server's loopbacks have equal attributes and fit one message: there are at most 8
	if t.from.software == Fared && !table {
		messages = each
	}
	c, k := t.n.cost, t.sessions()*servers
	c.Announced += k * each
	c.Updates += k * messages
	c.Bytes += k * messages * updateSize(t.from.software, attrs, each/messages)
}

// withdraw withdraws a route.
func (t *teller) withdraw(dest int) {
	t.send(message{dest: dest})
	servers, each := t.prefixes(dest)
	t.withdrawn += servers * each
}

// close counts the withdrawals.
func (t *teller) close() {
	if t.withdrawn == 0 {
		return
	}
	messages := t.withdrawn
	if t.from.software != Fared {
		messages = ceil(t.withdrawn, withdrawals)
	}
	c, k := t.n.cost, t.sessions()
	c.Withdrawn += k * t.withdrawn
	c.Updates += k * messages
	c.Bytes += k * (messages*emptyUpdate + t.withdrawn*prefixSize)
}

// endOfRIB ends the initial table of a new session.
func (t *teller) endOfRIB() {
	t.send(message{dest: -1})
	t.n.cost.Updates += t.sessions()
	t.n.cost.Bytes += t.sessions() * endOfRIB
}
