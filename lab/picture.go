package lab

import (
	"context"

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

// PlanePicture is one plane: its leaf, and how many of its cables carry light.
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
	p := Picture{Source: f.serverName(src), Destination: f.serverName(dst)}
	for plane := range f.Planes {
		up, cables := f.light(plane)
		p.Planes = append(p.Planes, PlanePicture{Plane: f.planeName(plane), Leaf: f.leafName(plane), Up: up, Cables: cables})
	}
	if t := f.packets(); t != nil {
		t.picture(&p, src, dst)
	}
	resp, err := f.api(src).GetWeights(context.Background(), &farev1.GetWeightsRequest{Destination: f.loopback(dst, 0).Addr().String()})
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
