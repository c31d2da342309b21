package lab

import (
	"context"
	"strings"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// Picture is how a fabric looks at one moment, for showing it.
type Picture struct {
	Planes []PlanePicture
	// Source and Destination are the servers whose weights are shown. Weights is nil while the source knows nothing of
	// the destination.
	Source, Destination string
	Weights             *farev1.DestinationWeights
	// Packets says that packets flow.
	Packets bool
}

// PlanePicture is one plane: its leaves, separated by commas, and how many of their cables carry light.
type PlanePicture struct {
	Plane, Leaf string
	Up, Cables  int
	// Rate is packets a second that the leaf's ports have received; Share the plane's part of the pair's packets, 0 to 1. Both
	// are of the last second, and 0 where no packets flow.
	Rate, Share float64
}

// Picture returns how the fabric looks now to a step's pair. It may be called while Run runs, and disturbs nothing.
func (f *Fabric) Picture(step *Step) Picture {
	src, dst := 0, 1
	if s, err := f.server(f.subst(step.Source)); err == nil {
		src = s
	}
	if d, err := f.server(f.subst(step.Destination)); err == nil {
		dst = d
	}
	p := Picture{Source: f.Server[src].Name, Destination: f.Server[dst].Name}
	for plane := range f.Planes {
		show := PlanePicture{Plane: f.PlaneName(plane)}
		var names []string
		for _, leaf := range f.Leaf[plane*f.Leaves : (plane+1)*f.Leaves] {
			names = append(names, leaf.Name)
			up, cables := f.light(leaf)
			show.Up, show.Cables = show.Up+up, show.Cables+cables
		}
		show.Leaf = strings.Join(names, ",")
		p.Planes = append(p.Planes, show)
	}
	if t := f.packets(); t != nil {
		t.picture(&p, src, dst)
	}
	resp, err := f.api(f.Server[src]).GetWeights(context.Background(), &farev1.GetWeightsRequest{Destination: f.Loopback(dst, 0).Addr().String()})
	if err == nil {
		p.Weights = resp.Weights
	}
	return p
}

// count returns how many of the ends have light, of how many.
func (c *cables) count() (up, all int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range c.events {
		if c.events[i].Up {
			up++
		}
	}
	return up, len(c.events)
}
