package prober

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/internal/proof"
	"github.com/fared/fared/daemon/internal/status"
)

const (
	// maxPings is the number of Pings at once, maxCount the number of probes of a slot.
	maxPings, maxCount, defaultCount = 4, 100, 3
	// maxLosses bounds the destinations with lost probes in a status.
	maxLosses = 256
)

// Status returns the results of probes. It may be called from any goroutine except the loop's.
func (p *Prober) Status() *farev1.ProofStatus {
	now := time.Now()
	p.mu.Lock()
	answering, all, planes := p.core.Tally()
	findings := p.core.Findings()
	losses := p.losses()
	out := &farev1.ProofStatus{Inactive: p.inactive, Port: uint32(p.c.Port), Answering: uint32(answering), Destinations: uint32(all), Losses: losses}
	if p.view == nil {
		out.Inactive = "the daemon starts"
	}
	for _, s := range p.sockets {
		if s.err != nil {
			out.Error = s.err.Error()
			out.Inactive = out.Error
		}
	}
	for i, n := range p.dropped {
		if n > 0 {
			out.Counters = append(out.Counters, &farev1.Counter{Name: fmt.Sprintf("proof_dropped{reason=%q}", reasonNames[i]), Value: n})
		}
	}
	p.devices.refresh(now, strangeAge)
	mtus := slices.Clone(p.devices.mtus)
	p.mu.Unlock()
	for i, t := range planes {
		m := &farev1.ProofPlane{Plane: p.c.Planes[i], Sent: t.Sent, Answered: t.Answered, Lost: t.Lost, RoundTripNs: uint64(t.RoundTrip), Recent: t.Recent}
		if !t.Last.IsZero() {
			m.ProofAgeNs = uint64(max(1, now.Sub(t.Last)))
		}
		out.Planes = append(out.Planes, m)
	}
	for i := range findings {
		f := &findings[i]
		m := &farev1.ProofFinding{
			Problem: string(f.Problem), Direction: string(f.Direction), Plane: f.Plane, Device: f.Device, Mtu: f.Big, Service: p.service(f), Avoided: f.Avoided, Destinations: uint32(f.Pairs),
			Source: f.Source, Destination: f.Destination, Slot: int32(f.Slot), Expected: f.Expected, Seen: f.Seen, Text: p.text(f), SinceNs: uint64(f.Since.UnixNano()),
		}
		m.Cause, m.Remedy = p.cause(f, mtus)
		out.Findings = append(out.Findings, m)
	}
	return out
}

// losses returns the destinations with lost probes. p.mu is held.
func (p *Prober) losses() (all []*farev1.ProofLoss) {
	for _, l := range p.core.Losses(maxLosses) {
		m := &farev1.ProofLoss{Plane: p.c.Planes[l.Plane], Destination: l.Address.String(), Probes: uint64(l.Probes), Lost: uint64(l.Lost)}
		if _, sources := p.core.PathsOf(l.ID); len(sources) > 0 {
			m.Source = sources[0].String()
		}
		all = append(all, m)
	}
	return all
}

// service returns the UDP port of a finding about a service's packets alone, otherwise 0.
func (p *Prober) service(f *proof.Finding) uint32 {
	if f.Service == 0 {
		return 0
	}
	return uint32(p.portOf(f.Service))
}

// Proof returns the results of probes of a destination. It may be called from any goroutine.
func (p *Prober) Proof(key status.Key) *farev1.DestinationProof {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.core.Show(proof.ID{Group: key.Source, Address: key.Addr()})
	out := &farev1.DestinationProof{
		PlanesProved: uint32(s.Proved), Planes: uint32(s.Planes), Reason: s.Reason, LossPpb: uint32(s.Loss * 1e9), RoundTripNs: uint64(s.RoundTrip),
	}
	if p.inactive != "" {
		out.Reason = p.inactive
	}
	if !s.Last.IsZero() {
		out.ProofAgeNs = uint64(max(1, time.Since(s.Last)))
	}
	return out
}

// Ping implements fare.v1.FabricService. Errors are Problems.
func (p *Prober) Ping(ctx context.Context, req *farev1.PingRequest) (*farev1.PingResponse, error) {
	ask, err := p.ask(req)
	if err != nil {
		return nil, err
	}
	done := make(chan struct{})
	ask.Done = func() { close(done) }
	p.mu.Lock()
	if p.pings >= maxPings {
		p.mu.Unlock()
		return nil, &status.Problem{Kind: status.Unavailable, Subject: "ping", Err: fmt.Errorf("%d others are running", maxPings), Remedy: "retry later"}
	}
	p.pings++
	p.core.Ask(time.Now(), ask)
	p.wakeUp()
	p.mu.Unlock()
	select {
	case <-done:
	case <-ctx.Done():
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.pings--
	p.core.Cancel(ask)
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	out := &farev1.PingResponse{Destination: ask.Address.String(), Source: ask.Source.String()}
	for _, r := range ask.Replies() {
		m := &farev1.PingReply{
			Slot: uint32(r.Path.Slot), Plane: p.c.Planes[r.Path.Plane], RoundTripNs: uint64(r.RoundTrip), LeftBy: r.Left, ArrivedPlane: r.ArrivedPlane,
			ArrivedBy: r.ArrivedDevice, ReturnedBy: r.ReturnDevice, ReturnedTo: r.Returned, Problem: string(r.Problem), Text: r.Text,
		}
		if r.Path.SubPort >= 0 {
			m.Device = p.c.SubPorts[r.Path.SubPort].Device
		}
		out.Replies = append(out.Replies, m)
	}
	return out, nil
}

// ask converts a request.
func (p *Prober) ask(req *farev1.PingRequest) (*proof.Ask, error) {
	invalid := func(field, text, remedy string) error {
		return &status.Problem{Kind: status.Invalid, Subject: field, Err: errors.New(text), Remedy: remedy}
	}
	dst, err := parseAddress(req.GetDestination())
	if err != nil {
		return nil, invalid("destination", strconv.Quote(req.GetDestination())+" is no address", "name a destination of 'fared weights'")
	}
	var src netip.Addr
	if req.GetSource() != "" {
		if src, err = parseAddress(req.GetSource()); err != nil {
			return nil, invalid("source", strconv.Quote(req.GetSource())+" is no address", "name a local loopback of 'fared status'")
		}
	}
	if req.GetPlane() != "" && !slices.Contains(p.c.Planes, req.GetPlane()) {
		return nil, invalid("plane", strconv.Quote(req.GetPlane())+" is no plane", "'fared planes' lists them")
	}
	header := familyOf(dst).header
	size, count := int(req.GetSize()), int(req.GetCount())
	if size == 0 {
		size = proof.MinSize + header
	}
	if least, most := proof.MinSize+header, maxPayload+header; size < least || size > most {
		return nil, invalid("size", fmt.Sprintf("%d bytes", size), fmt.Sprintf("use %d to %d", least, most))
	}
	if count == 0 {
		count = defaultCount
	}
	if count > maxCount {
		return nil, invalid("count", strconv.Itoa(count), fmt.Sprintf("use at most %d", maxCount))
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.inactive != "" || p.view == nil {
		return nil, &status.Problem{Kind: status.Refused, Subject: "proof", Err: errors.New("no probes are sent: " + p.inactive), Remedy: "see /usr/share/doc/fared/operations/proof.md"}
	}
	for g := range p.view.Layout().Groups {
		a := &proof.Ask{ID: proof.ID{Group: g, Address: dst}, Size: size - header, Count: count}
		paths, sources := p.core.PathsOf(a.ID)
		i := slices.IndexFunc(sources, func(s netip.Addr) bool { return s == src || !src.IsValid() && s.Is4() == dst.Is4() })
		if i < 0 {
			continue
		}
		a.Source = sources[i]
		for _, path := range paths {
			if (req.GetPlane() == "" || p.c.Planes[path.Plane] == req.GetPlane()) && (req.Slot == nil || path.Slot == int(req.GetSlot())) {
				a.Paths = append(a.Paths, path)
			}
		}
		if len(a.Paths) > 0 {
			return a, nil
		}
	}
	return nil, &status.Problem{
		Kind: status.NotFound, Subject: dst.String(), Err: errors.New("no such slot toward it carries a share in effect"), Remedy: "'fared weights' lists destinations, 'fared slots' their slots",
	}
}

// parseAddress parses an address or a host prefix.
func parseAddress(text string) (netip.Addr, error) {
	if prefix, err := netip.ParsePrefix(text); err == nil && prefix.IsSingleIP() {
		return prefix.Addr(), nil
	}
	return netip.ParseAddr(text)
}
