package speaker

import (
	"fmt"
	"net"

	api "github.com/osrg/gobgp/v3/api"
)

// event handles GoBGP's watch events. The watch's goroutine calls it; it only
// converts and enqueues, because GoBGP's queue behind it is unbounded.
func (in *incarnation) event(r *api.WatchEventResponse) {
	switch e := r.Event.(type) {
	case *api.WatchEventResponse_Peer:
		p := e.Peer.GetPeer()
		if p.GetState().GetNeighborAddress() == in.addr.String() {
			in.peerEvent(p)
		}
	case *api.WatchEventResponse_Table:
		if in.over.Load() {
			return
		}
		for _, path := range e.Table.GetPaths() {
			in.path(path)
		}
	}
}

func (in *incarnation) peerEvent(p *api.Peer) {
	state := p.GetState().GetSessionState()
	switch {
	case state == api.PeerState_ACTIVE && in.phase == 0:
		in.phase = 1
		close(in.active)
	case (state == api.PeerState_ESTABLISHED || state == api.PeerState_IDLE) && in.phase == 1:
		in.phase = 2
		close(in.settled)
	}
	if state == api.PeerState_IDLE && in.phase == 2 {
		in.phase = 3
		close(in.idle)
	}
	if state != api.PeerState_ESTABLISHED || in.over.Load() {
		return
	}
	in.mu.Lock()
	local, silent := in.local, in.silent
	in.mu.Unlock()
	// Another process on this host may have reached GoBGP's port first.
	if local == nil || uint32(local.LocalAddr().(*net.TCPAddr).Port) != p.GetTransport().GetRemotePort() {
		in.stop(fmt.Errorf("gobgp's connection is from port %d, which belongs to another process", p.GetTransport().GetRemotePort()))
		return
	}
	info, _ := in.guard.Info()
	in.wasUp.Store(true)
	in.s.established(in.gen)
	in.s.speaker.queue.sessionUp(SessionUp{
		Session: in.s.index, Generation: in.gen, Node: info.RouterID, PeerAS: info.PeerAS, Families: info.Families,
	}, silent)
	in.s.upReported(in.gen)
}

func (in *incarnation) path(p *api.Path) {
	q, session := in.s.speaker.queue, in.s.index
	switch {
	case p.GetNlri() == nil:
		f := IPv4
		if p.GetFamily().GetAfi() == api.Family_AFI_IP6 {
			f = IPv6
		}
		if f == IPv4 && in.cameOut() {
			return
		}
		q.endOfRIB(EndOfRIB{Session: session, Generation: in.gen, Family: f})
	case p.GetIsWithdraw():
		prefix, err := in.conv.prefix(p)
		if err != nil {
			q.fault(Fault{Session: session, Reason: err.Error()})
			return
		}
		q.withdraw(Withdraw{Session: session, Generation: in.gen, Prefix: prefix})
	default:
		prefix, attrs, err := in.conv.route(p)
		if err != nil {
			// The route cannot be decoded. Treat it as withdrawn: neither the
			// previous value nor "no bandwidth" would be correct (cf. RFC 7606,
			// Section 2).
			q.fault(Fault{Session: session, Reason: err.Error()})
			if prefix.IsValid() {
				q.withdraw(Withdraw{Session: session, Generation: in.gen, Prefix: prefix})
			}
			return
		}
		q.route(Route{Session: session, Generation: in.gen, Prefix: prefix, Attrs: attrs})
	}
}
