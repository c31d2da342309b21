package lab

import (
	"context"
	"strings"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/lab/backend"
	"github.com/fared/fared/topo"
)

// Picture is a snapshot of a fabric for display.
type Picture struct {
	Planes []PlanePicture
	// Source and Destination are the source groups whose weights are shown. Weights is nil while the source has no row
	// for the destination.
	Source, Destination string
	Weights             *farev1.DestinationWeights
	// Packets is true if packets flow.
	Packets bool
}

// PlanePicture describes one plane: its leaves, separated by commas, and how many of their cables are up.
type PlanePicture struct {
	Plane, Leaf string
	Up, Cables  int
	// Rate is the number of packets per second received at the leaf's ports, Share the plane's fraction of the pair's
	// packets, 0 to 1. Both cover the last second, and are 0 if no packets flow.
	Rate, Share float64
}

// PlanePictures returns the state of the planes for display, without shares, and whether packets flow. It is safe to
// call while Run runs and does not affect it.
func (f *Fabric) PlanePictures() (planes []PlanePicture, packets bool) {
	for plane := range f.Planes {
		planes = append(planes, f.planePicture(plane))
	}
	if f.flow == nil {
		return planes, false
	}
	for plane, r := range f.flow.Rates(0, f.GroupsEach()) {
		planes[plane].Rate = r.Packets
	}
	return planes, f.flow.Sends()
}

// planePicture returns a plane without packets.
func (f *Fabric) planePicture(plane int) PlanePicture {
	show := PlanePicture{Plane: f.PlaneName(plane)}
	var names []string
	for _, leaf := range f.Leaf[plane*f.Leaves : (plane+1)*f.Leaves] {
		names = append(names, leaf.Name)
		up, cables := f.backend.Light(leaf)
		show.Up, show.Cables = show.Up+up, show.Cables+cables
	}
	show.Leaf = strings.Join(names, ",")
	return show
}

// Daemon returns the API of a node's daemon, or nil if the node's software has none.
func (f *Fabric) Daemon(n *topo.Node) backend.API { return f.backend.API(n) }

// pictureTimeout bounds the query for a picture's weights, so that a display does not block while a daemon does not
// answer.
const pictureTimeout = time.Second

// Picture returns the present state of the fabric for a step's pair, without weights if the daemon of the source's
// server does not answer. It is safe to call while Run runs and does not affect it.
func (f *Fabric) Picture(step *Step) Picture {
	src, dst := 0, f.GroupsEach()
	if s, err := f.GroupsNamed(f.subst(step.Source)); err == nil {
		src = s[0]
	}
	if d, err := f.GroupsNamed(f.subst(step.Destination)); err == nil {
		dst = d[0]
	}
	p := Picture{Source: f.Groups()[src].Name, Destination: f.Groups()[dst].Name}
	for plane := range f.Planes {
		p.Planes = append(p.Planes, f.planePicture(plane))
	}
	if f.flow != nil {
		p.Packets = f.flow.Sends()
		for plane, r := range f.flow.Rates(src, dst) {
			p.Planes[plane].Rate, p.Planes[plane].Share = r.Packets, r.Share
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), pictureTimeout)
	defer cancel()
	resp, err := f.backend.API(f.Server[f.Host(src)]).GetWeights(ctx,
		&farev1.GetWeightsRequest{Destination: f.Address(dst).String(), Sources: []string{f.Address(src).String()}})
	if err == nil && len(resp.Weights) == 1 {
		p.Weights = resp.Weights[0]
	}
	return p
}
