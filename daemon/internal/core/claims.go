package core

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/fared/fared/fare"
)

// claims records the addresses that more than one origin announces: destinations, and loopbacks of this server.
type claims struct {
	groups    map[sourceKey[fare.GroupID]]bool // groups whose destinations several origins announce
	members   map[sourceKey[netip.Prefix]]bool // destinations, by source group
	conflicts map[netip.Prefix]int             // destinations with the number of their source groups
	own       map[netip.Prefix]bool            // our loopbacks that another AS announces
	known     map[netip.Prefix]int             // conflicts before a reload, which are no news
	news      []Fault
	more      int // number of news beyond newsPerStep
}

type sourceKey[T any] struct {
	source int
	of     T
}

// newsPerStep bounds the reports of one event: one leaf may announce all destinations at once.
const newsPerStep = 8

func (k *claims) report(subject netip.Prefix, format string, args ...any) {
	if len(k.news) == newsPerStep {
		k.more++
		return
	}
	k.news = append(k.news, Fault{subject.String(), fmt.Errorf(format, args...)})
}

// takeNews returns the conflicts that began or ended since the last call.
func (k *claims) takeNews() []Fault {
	news := k.news
	if k.more > 0 {
		news = append(news, Fault{"conflicts", fmt.Errorf("%d more destinations changed between one origin and several", k.more)})
	}
	k.news, k.more = nil, 0
	return news
}

// noteOrigins updates the destinations with several origins after a change of a table.
func (c *Core) noteOrigins(source int, ch fare.Change) {
	k, table := &c.claims, c.sources[source].table
	group := sourceKey[fare.GroupID]{source, ch.Group}
	switch ch.Kind {
	case fare.GroupSet:
		now := table.Group(ch.Group).Origins > 1
		if now == k.groups[group] {
			return
		}
		if !now {
			delete(k.groups, group)
		} else if k.groups == nil {
			k.groups = map[sourceKey[fare.GroupID]]bool{group: true}
		} else {
			k.groups[group] = true
		}
		for _, prefix := range slices.SortedFunc(table.Members(ch.Group), netip.Prefix.Compare) {
			k.destination(source, prefix, now, table)
		}
	case fare.GroupDelete:
		delete(k.groups, group)
	case fare.DestinationSet:
		k.destination(source, ch.Destination, table.Group(ch.Group).Origins > 1, table)
	case fare.DestinationDelete:
		k.destination(source, ch.Destination, false, table)
	}
}

func (k *claims) destination(source int, prefix netip.Prefix, now bool, table *fare.Table) {
	member := sourceKey[netip.Prefix]{source, prefix}
	if now == k.members[member] {
		return
	}
	if !now {
		delete(k.members, member)
		if k.conflicts[prefix]--; k.conflicts[prefix] == 0 {
			delete(k.conflicts, prefix)
			k.report(prefix, "one origin announces it again")
		}
		return
	}
	if k.members == nil {
		k.members, k.conflicts = map[sourceKey[netip.Prefix]]bool{}, map[netip.Prefix]int{}
	}
	k.members[member] = true
	if k.conflicts[prefix]++; k.conflicts[prefix] == 1 && k.known[prefix] == 0 {
		if len(k.news) < newsPerStep {
			k.report(prefix, "%s", ConflictText(table.Describe(prefix)))
		} else {
			k.more++
		}
	}
}

// ConflictText describes the origins of a destination and the policy that applies.
func ConflictText(d fare.Description) string {
	var origins []string
	for _, r := range d.Routes {
		if text := fmt.Sprintf("AS %d over %s", r.Origin, r.Name); r.Origin != 0 && r.Reason != fare.ReasonSessionDown {
			origins = append(origins, text)
		}
	}
	return fmt.Sprintf("%d origins announce it, %s; path_bandwidth.conflict: %s", d.Origins, strings.Join(origins, ", "), d.Conflict)
}

// noteOwn updates the claims to loopbacks of this server after a change of the routes to them. A leaf may send our own
// routes back; another AS at the end of the path is another origin, by mistake or hijack.
func (c *Core) noteOwn(prefixes ...netip.Prefix) {
	k := &c.claims
	for _, prefix := range prefixes {
		by, session := uint32(0), -1
		for i := range c.sessions {
			attrs := c.own[ownRoute{i, prefix}].Attrs
			if attrs == nil { // no route, or a route without attributes (RFC 7606)
				continue
			}
			if origin := fare.OriginOf(attrs.ASPath, c.sessions[i].peerAS, false); origin != 0 && origin != c.cfg.AS {
				by, session = origin, i
				break
			}
		}
		switch claimed := k.own[prefix]; {
		case by == 0 && claimed:
			delete(k.own, prefix)
			k.report(prefix, "no other AS announces this local loopback now")
		case by != 0 && !claimed:
			if k.own == nil {
				k.own = map[netip.Prefix]bool{}
			}
			k.own[prefix] = true
			k.report(prefix, "AS %d announces this local loopback over %s: find the owner of the AS; this is a mistake or a hijack", by, c.layout.Sessions[session].Name)
		}
	}
}
