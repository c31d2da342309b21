package core

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"

	"github.com/fared/fared/fare"
)

// ignoredKey identifies a session with routes whose bandwidth is ignored for a reason.
type ignoredKey struct {
	session int
	reason  fare.Reason
}

// ignored tracks the ignored bandwidth of all source groups. The zero value is empty.
type ignored struct {
	groups  map[sourceKey[fare.GroupID]][]fare.IgnoredBandwidth // groups with ignored bandwidth
	changed []sourceKey[fare.GroupID]                           // since the last call of takeIgnored; it omits deleted groups
	dirty   bool                                                // a table has changed since that call
}

// noteIgnored updates the ignored bandwidth after a change of a table, in O(1) for groups without any before and after.
func (c *Core) noteIgnored(source int, ch fare.Change) {
	g := &c.unbelieved
	key := sourceKey[fare.GroupID]{source, ch.Group}
	switch ch.Kind {
	case fare.GroupSet:
		now := c.sources[source].table.Group(ch.Group).Ignored
		if slices.Equal(now, g.groups[key]) {
			return
		}
		g.dirty = true
		g.changed = append(g.changed, key)
		if len(now) == 0 {
			delete(g.groups, key)
			return
		}
		if g.groups == nil {
			g.groups = map[sourceKey[fare.GroupID]][]fare.IgnoredBandwidth{}
		}
		g.groups[key] = slices.Clone(now)
	case fare.GroupDelete:
		if _, ok := g.groups[key]; ok {
			g.dirty = true
			delete(g.groups, key)
		}
	}
}

// IgnoredRoutes counts routes with ignored bandwidth by session and reason, sorted. A session that serves several
// source groups has its routes in each; its count is the largest of these.
func (c *Core) IgnoredRoutes() []fare.IgnoredRoutes {
	all := map[ignoredKey]fare.IgnoredRoutes{}
	for i := range c.sources {
		at := c.layout.Sources[i].at.sessions
		for _, x := range c.sources[i].table.Ignored() {
			x.Session = slices.Index(at, x.Session)
			if key := (ignoredKey{x.Session, x.Reason}); x.Routes > all[key].Routes {
				all[key] = x
			}
		}
	}
	return slices.SortedFunc(maps.Values(all), func(a, b fare.IgnoredRoutes) int {
		return cmp.Or(cmp.Compare(a.Session, b.Session), cmp.Compare(a.Reason, b.Reason))
	})
}

// TakeIgnored calls destination for the destinations of each group whose ignored bandwidth has changed since the last
// call. It reports whether that of any group has changed, removed groups included.
func (c *Core) TakeIgnored(destination func(source int, prefix netip.Prefix)) bool {
	g := &c.unbelieved
	for _, key := range g.changed {
		for prefix := range c.sources[key.source].table.Members(key.of) {
			destination(key.source, prefix)
		}
	}
	dirty := g.dirty
	g.changed, g.dirty = g.changed[:0], false
	return dirty
}
