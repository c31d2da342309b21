package topo

import "net/netip"

// Way is a direction from a source group, by its index, to a remote loopback.
type Way struct {
	Source      int
	Destination netip.Addr
}

// Host returns the index of a source group's server.
func (f *Fabric) Host(group int) int { return group / f.GroupsEach() }

// GroupsAt returns the indexes of a server's source groups.
func (f *Fabric) GroupsAt(server int) (all []int) {
	for i := range f.GroupsEach() {
		all = append(all, server*f.GroupsEach()+i)
	}
	return all
}

// Address returns the first address of a source group's first GPU.
func (f *Fabric) Address(group int) netip.Addr { return f.LoopbacksOf(f.Groups()[group])[0].Addr() }
