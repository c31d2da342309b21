package speaker

import (
	"fmt"
	"net"

	api "github.com/osrg/gobgp/v3/api"
)

// event handles GoBGP's watch events. The watch's goroutine calls it.
func (in *incarnation) event(r *api.WatchEventResponse) {
	if p := r.GetPeer().GetPeer(); p.GetState().GetNeighborAddress() == in.addr.String() {
		in.peerEvent(p)
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
	local := in.local
	in.mu.Unlock()
	// Another process on this host may have reached GoBGP's port first.
	if local == nil || uint32(local.LocalAddr().(*net.TCPAddr).Port) != p.GetTransport().GetRemotePort() {
		in.stop(fmt.Errorf("gobgp's connection is from port %d, which belongs to another process", p.GetTransport().GetRemotePort()))
		return
	}
	in.served.Store(true)
	in.s.upReported(in.gen)
}
