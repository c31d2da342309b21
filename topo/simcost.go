package topo

import "github.com/fared/fared/fare"

// Cost is what a change cost the fabric, on all of its sessions and at all of its servers. The zero value is nothing.
type Cost struct {
	// Rounds is how often messages crossed until there were no more: 1 when leaves tell servers, 3 when a leaf tells spines,
	// spines leaves, and leaves servers.
	Rounds int `json:"rounds"`
	// Updates is the number of UPDATE messages (RFC 4271, Section 4.3), End-of-RIB among them; Bytes is their octets, with the
	// header and without TCP. OPEN and KEEPALIVE are not counted. GoBGP, as fared drives it, gives each route that changes a
	// message of its own, and sends what it has when a session comes up with routes of equal attributes together; FRR and BIRD
	// do that always.
	Updates int `json:"updates"`
	Bytes   int `json:"bytes"`
	// Announced and Withdrawn are routes in them: one for each loopback, session and message.
	Announced int `json:"announced"`
	Withdrawn int `json:"withdrawn"`
	// SubPorts is the number of sub-ports of servers that changed state: one operation each toward their data planes, which is
	// all that a failure at the server itself takes there.
	SubPorts int `json:"sub_ports"`
	// Pairs is the number of pairs of servers whose weights changed, of planes or of sub-ports, Destinations that of remote GPUs
	// it concerns, summed over the servers, and Vectors that of weight vectors a server has now and had not before, likewise.
	Pairs        int `json:"pairs"`
	Destinations int `json:"destinations"`
	Vectors      int `json:"vectors"`
}

// compare counts what became of weights. Both lists are in the order of network.pairs.
func (c *Cost) compare(n *network, before, after []string) {
	had, has := map[int]map[string]bool{}, map[int]map[string]bool{}
	note := func(sets map[int]map[string]bool, class int, vector string) {
		if sets[class] == nil {
			sets[class] = map[string]bool{}
		}
		sets[class][vector] = true
	}
	i := 0
	n.pairs(func(src, _, count int) {
		class := n.classOf[src]
		note(had, class, before[i])
		note(has, class, after[i])
		if before[i] != after[i] {
			c.Pairs += count
			c.Destinations += count * n.fabric.GPUs
		}
		i++
	})
	for class, vectors := range has {
		for v := range vectors {
			if !had[class][v] {
				c.Vectors += n.classes[class].size
			}
		}
	}
}

// Sizes of an UPDATE in octets (RFC 4271, Section 4.3): marker, length and type; the two lengths; ORIGIN; AS_PATH of one
// segment with four octets an AS (RFC 6793); NEXT_HOP; EXTENDED COMMUNITIES (RFC 4360) of eight each; a /32 each.
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

// updateSize is an UPDATE that announces some loopbacks with equal attributes. FRR writes the length of AS_PATH in two octets.
func updateSize(software string, attrs *fare.Attributes, prefixes int) int {
	size := emptyUpdate + originSize + pathSize + 4*len(attrs.ASPath) + nextHopSize + communities + 8*len(attrs.Communities) + prefixes*prefixSize
	if software == FRR {
		size++
	}
	return size
}

// withdrawals is how many of them one message holds.
const withdrawals = (maxMessage - emptyUpdate) / prefixSize

// teller sends one round's messages on a session and counts them, for all sessions that this one stands for.
type teller struct {
	n         *network
	from      *simNode
	session   *simSession
	withdrawn int // loopbacks of each such session
}

// sessions is how many real ones this one stands for.
func (t *teller) sessions() int {
	for _, sn := range []*simNode{t.from, t.session.peer.node} {
		if sn.dest >= 0 {
			return t.n.dests[sn.dest].receives
		}
	}
	return 1
}

// prefixes is how many loopbacks a destination stands for; to a server's leaf the server is but one.
func (t *teller) prefixes(dest int) (servers, each int) {
	if t.from.dest >= 0 {
		return 1, t.n.fabric.GPUs
	}
	return t.n.dests[dest].stands, t.n.fabric.GPUs
}

func (t *teller) send(m message) {
	m.session = t.session.peer.session
	to := t.session.peer.node
	to.inbox = append(to.inbox, m)
}

// announce says a route. table: it is part of what a new session is told.
func (t *teller) announce(dest int, attrs *fare.Attributes, table bool) {
	t.send(message{dest: dest, attrs: attrs})
	servers, each := t.prefixes(dest)
	messages := 1 // a server's loopbacks have equal attributes, and fit: there are at most 8
	if t.from.software == Fared && !table {
		messages = each
	}
	c, k := t.n.cost, t.sessions()*servers
	c.Announced += k * each
	c.Updates += k * messages
	c.Bytes += k * messages * updateSize(t.from.software, attrs, each/messages)
}

// withdraw takes a route back.
func (t *teller) withdraw(dest int) {
	t.send(message{dest: dest})
	servers, each := t.prefixes(dest)
	t.withdrawn += servers * each
}

// close sends the withdrawals.
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

// endOfRIB ends what a new session is told.
func (t *teller) endOfRIB() {
	t.send(message{dest: -1})
	t.n.cost.Updates += t.sessions()
	t.n.cost.Bytes += t.sessions() * endOfRIB
}
