package core

import (
	"net/netip"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/wecmp"
)

// Layout numbers the configuration's planes, sub-ports and sessions; all other parts refer to these by index. The order
// is the configuration's.
type Layout struct {
	Planes   []string
	OfPlane  [][]int // by plane: indexes of its sub-ports
	SubPorts []LayoutSubPort
	Sessions []LayoutSession
	Sources  []SourceLayout // at least one; empty in the layout of a source group
	// homes are the homes of the slots of a source group after reloads with other sub-ports; nil means in turn.
	homes []wecmp.Place
}

// LayoutSubPort is a configured sub-port with its place.
type LayoutSubPort struct {
	config.SubPort
	Plane   int
	inPlane int // index within the plane
}

// LayoutSession is a configured session with its place.
type LayoutSession struct {
	config.Session
	SubPort   int
	Plane     int
	Codec     fare.Codec
	FamilySet [2]bool // IPv4, IPv6
}

// NewLayout returns the layout of a resolved configuration.
func NewLayout(cfg *config.Config) Layout {
	l := wholeLayout(cfg)
	groups := cfg.SourceGroups()
	for _, g := range groups {
		s := l.serving(g)
		if len(groups) > 1 {
			s.Name = g.Loopbacks[0]
		}
		l.Sources = append(l.Sources, s)
	}
	return l
}

func wholeLayout(cfg *config.Config) Layout {
	var l Layout
	for p, plane := range cfg.Planes {
		l.Planes, l.OfPlane = append(l.Planes, plane.Name), append(l.OfPlane, nil)
		for k, sp := range plane.SubPorts {
			for _, s := range sp.Sessions {
				ls := LayoutSession{Session: s, SubPort: len(l.SubPorts), Plane: p}
				ls.Codec = fare.Codec{
					Encoding: cfg.PathBandwidth.Encoding, FAREType: cfg.PathBandwidth.FAREType, FARESubType: cfg.PathBandwidth.FARESubType,
					Format: s.Format, AS: cfg.AS, Min: plane.Minimum, Max: plane.Maximum,
					NonTransitive: !cfg.PathBandwidth.Transitive, Administrator: cfg.PathBandwidth.Administrator, Scale: cfg.PathBandwidth.Scale,
				}
				for _, f := range s.Families {
					if f == config.IPv6 {
						ls.FamilySet[1] = true
					} else {
						ls.FamilySet[0] = true
					}
				}
				l.Sessions = append(l.Sessions, ls)
			}
			l.OfPlane[p] = append(l.OfPlane[p], len(l.SubPorts))
			l.SubPorts = append(l.SubPorts, LayoutSubPort{SubPort: sp, Plane: p, inPlane: k})
		}
	}
	return l
}

// carries reports whether a session carries a prefix's address family.
func (s *LayoutSession) carries(p netip.Prefix) bool {
	if p.Addr().Is4() {
		return s.FamilySet[0]
	}
	return s.FamilySet[1]
}

func (l *Layout) fareConfig(cfg *config.Config) fare.Config {
	policy := cfg.Policies()
	out := fare.Config{Planes: l.Planes, Role: cfg.Role, Missing: policy.Missing, AllMissing: policy.AllMissing, AllZero: policy.AllZero, Conflict: policy.Conflict, LeastPreferred: policy.LeastPreferred, Unproved: policy.Unproved}
	for _, sp := range l.SubPorts {
		out.SubPorts = append(out.SubPorts, fare.SubPort{Device: sp.Device, Plane: sp.Plane, Speed: sp.Speed, Uplink: sp.ShareGroup() != ""})
	}
	for _, s := range l.Sessions {
		out.Sessions = append(out.Sessions, fare.Session{Name: s.Name, SubPort: s.SubPort, Codec: s.Codec})
	}
	return out
}

// EngineConfig returns the weight engine's configuration for the sub-ports of the layout.
func (l *Layout) EngineConfig(cfg *config.Config) wecmp.Config {
	w := cfg.Weights
	out := wecmp.Config{
		Mode: w.Mode, Policy: w.Policy, Addressing: w.Addressing, Slots: w.Slots, Ordering: w.Ordering, Hash: w.Hash.Hasher(),
		MaxWeight: w.MaxWeight, MaxWeightSum: w.MaxWeightSum,
	}
	out.Protocol, out.Port = cfg.Dataplane.Flows()
	out.Homes = l.homes
	if cfg.Role == fare.RoleLeaf {
		// No queue pair begins at a leaf. Per-packet mode has the fewest possible slots, one per plane, and they are
		// not published.
		out = wecmp.Config{Mode: wecmp.PerPacket, MaxWeight: w.MaxWeight, MaxWeightSum: w.MaxWeightSum}
	}
	for p, name := range l.Planes {
		plane := wecmp.Plane{Name: name}
		for _, sp := range l.SubPorts {
			if sp.Plane == p {
				plane.SubPorts = append(plane.SubPorts, wecmp.SubPort{Name: sp.Device})
			}
		}
		out.Planes = append(out.Planes, plane)
	}
	return out
}

// subPortByDevice returns the index of a device's sub-port, or -1.
func (l *Layout) subPortByDevice(device string) int {
	for i := range l.SubPorts {
		if l.SubPorts[i].Device == device {
			return i
		}
	}
	return -1
}

// Devices returns the sub-ports' devices in configuration order.
func (l *Layout) Devices() []string {
	var out []string
	for i := range l.SubPorts {
		out = append(out, l.SubPorts[i].Device)
	}
	return out
}

// Device returns the device of a plane's sub-port by its index within the plane.
func (l *Layout) Device(plane, inPlane int) string {
	return l.SubPorts[l.OfPlane[plane][inPlane]].Device
}
