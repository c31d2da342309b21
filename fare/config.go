package fare

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
)

// Limits of a [Config].
const (
	MaxPlanes   = 64
	MaxSubPorts = 64   // per plane of a server; at a leaf MaxSessions bounds the ports
	MaxSessions = 4096 // in total
	// MaxAvoided is the number of destinations toward which planes are avoided, as many as a server may have.
	MaxAvoided = 1 << 17
)

// Config describes the planes, sub-ports and sessions of a [Table]. The zero
// value makes a table without planes, in which nothing is reachable.
type Config struct {
	Planes     []string // names; the index is the plane
	SubPorts   []SubPort
	Sessions   []Session
	Missing    MissingPolicy
	AllMissing AllMissingPolicy
	AllZero    ZeroPolicy
	Conflict   ConflictPolicy
	// LeastPreferred are the signals that have an effect. SignalPrepended has none at a leaf, which compares the
	// lengths of paths.
	LeastPreferred Signals
	Unproved       UnprovedPolicy
	Role           Role
}

// SubPort is one physical lane of a plane.
type SubPort struct {
	Device string    // name, for [Description] only
	Plane  int       // index
	Speed  Bandwidth // 0: unknown until a [LinkState] reports it
	// Uplink marks a leaf's sub-port toward spines, as opposed to servers. A
	// route over it never describes the sub-port (see [RouteDescription]).
	Uplink bool
}

// Session is one BGP session over one sub-port.
type Session struct {
	Name    string // unique
	SubPort int    // index
	Codec   Codec
}

// ErrConfig is wrapped by every error of [NewTable].
var ErrConfig = errors.New("invalid configuration of the path-bandwidth table")

// validate returns all errors at once.
func (c *Config) validate() error {
	var errs []error
	wrong := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }

	if len(c.Planes) > MaxPlanes {
		wrong("planes: %d given, at most %d are possible", len(c.Planes), MaxPlanes)
	}
	names := make(map[string]int)
	for i, name := range c.Planes {
		if name == "" {
			wrong("planes[%d]: the name is missing", i)
		} else if first, ok := names[name]; ok {
			wrong("planes[%d]: %q is already the name of planes[%d]", i, name, first)
		}
		names[name] = i
	}
	perPlane := make([]int, len(c.Planes))
	for i, sp := range c.SubPorts {
		if sp.Speed > MaxBandwidth {
			wrong("sub-ports[%d]: speed %d bit/s, at most %d is possible", i, uint64(sp.Speed), uint64(MaxBandwidth))
		}
		if sp.Plane < 0 || sp.Plane >= len(c.Planes) {
			wrong("sub-ports[%d]: plane %d does not exist, there are %d planes", i, sp.Plane, len(c.Planes))
			continue
		}
		if perPlane[sp.Plane]++; perPlane[sp.Plane] == MaxSubPorts+1 && c.Role == RoleServer {
			wrong("sub-ports[%d]: plane %q has more than %d sub-ports", i, c.Planes[sp.Plane], MaxSubPorts)
		}
	}
	if len(c.Sessions) > MaxSessions {
		wrong("sessions: %d given, at most %d are possible", len(c.Sessions), MaxSessions)
	}
	clear(names)
	for i, s := range c.Sessions {
		if s.SubPort < 0 || s.SubPort >= len(c.SubPorts) {
			wrong("sessions[%d]: sub-port %d does not exist, there are %d sub-ports", i, s.SubPort, len(c.SubPorts))
		}
		if s.Name == "" {
			wrong("sessions[%d]: the name is missing", i)
		} else if first, ok := names[s.Name]; ok {
			wrong("sessions[%d]: %q is already the name of sessions[%d]", i, s.Name, first)
		}
		names[s.Name] = i
		if err := s.Codec.Validate(); err != nil {
			wrong("sessions[%d]: %w", i, err)
		}
	}
	if int(c.Missing) >= len(missingNames) {
		wrong("missing bandwidth policy: %s", c.Missing)
	}
	if int(c.AllMissing) >= len(allMissingNames) {
		wrong("all missing policy: %s", c.AllMissing)
	}
	if int(c.AllZero) >= len(zeroNames) {
		wrong("all zero policy: %s", c.AllZero)
	}
	if int(c.Conflict) >= len(conflictNames) {
		wrong("conflict policy: %s", c.Conflict)
	}
	if c.LeastPreferred&^AllSignals != 0 {
		wrong("least preferred: signals %#x", uint8(c.LeastPreferred))
	}
	if int(c.Unproved) >= len(unprovedNames) {
		wrong("unproved policy: %s", c.Unproved)
	}
	if int(c.Role) >= len(roleNames) {
		wrong("role: %s", c.Role)
	}
	if errs != nil {
		return fmt.Errorf("%w: %w", ErrConfig, errors.Join(errs...))
	}
	return nil
}

// rankRange is the sessions with ranks in [lo, hi).
type rankRange struct{ lo, hi uint16 }

// ranks orders sessions by plane, sub-port and index, so that the sessions of
// one sub-port, and those of one plane, are adjacent.
func (c *Config) ranks() []int {
	order := make([]int, len(c.Sessions))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int {
		x, y := c.Sessions[a].SubPort, c.Sessions[b].SubPort
		return cmp.Or(cmp.Compare(c.SubPorts[x].Plane, c.SubPorts[y].Plane), cmp.Compare(x, y), cmp.Compare(a, b))
	})
	return order
}
