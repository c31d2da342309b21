package traffic

import (
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/fared/fared/transport/nupa"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/roce"
	"github.com/fared/fared/transport/superp"
	"github.com/fared/fared/transport/tcpqp"
)

// TransportOptions are options of transports. The zero value means their defaults.
type TransportOptions struct {
	// MTU is the payload size of a packet in bytes, for transports that segment packets (roce: 256, 512, 1024, 2048 or
	// 4096; superp: 64 to 32768); 0 means 1024.
	MTU int
	// NupaFile is the file that nupa's endpoints share. NupaSize is the size in bytes with which it is created if it
	// does not exist, and NupaChannels its number of channels.
	NupaFile     string
	NupaSize     int64
	NupaChannels int
	// SUNH makes superp use SUNH in place of UDP/IP, if it has a subnet.
	SUNH superp.SUNHConfig
	// NupaShared declares that endpoints on several kernels map the memory behind NupaFile, as they do that of a
	// device. NupaDeadAfter is the time without a heartbeat after which such an endpoint is dead; 0 means 2 s.
	NupaShared    bool
	NupaDeadAfter time.Duration
	// Option makes TCP segments carry the message framing option.
	Option bool
	// Log is the log of the tcp transport.
	Log *slog.Logger
}

// transports holds the constructors of all transports, by name.
var transports = map[string]func(TransportOptions) (rdma.Transport, error){
	"roce": func(o TransportOptions) (rdma.Transport, error) {
		if mtus := []int{0, 256, 512, 1024, 2048, 4096}; !slices.Contains(mtus, o.MTU) {
			return nil, fmt.Errorf("roce has no MTU of %d bytes, but %v", o.MTU, mtus[1:])
		}
		return roce.New(roce.Config{MTU: o.MTU}), nil
	},
	"superp": func(o TransportOptions) (rdma.Transport, error) {
		c, err := superp.Config{Payload: o.MTU, SUNH: o.SUNH}.Resolve()
		if err != nil {
			return nil, err
		}
		return superp.New(c), nil
	},
	"tcp": func(o TransportOptions) (rdma.Transport, error) {
		return tcpqp.New(tcpqp.Config{Option: o.Option, Log: o.Log}), nil
	},
	"nupa": func(o TransportOptions) (rdma.Transport, error) {
		if o.NupaFile == "" {
			return nil, fmt.Errorf("nupa needs the file that its endpoints share")
		}
		return nupa.New(nupa.Config{File: o.NupaFile, Size: o.NupaSize, Channels: o.NupaChannels,
			Shared: o.NupaShared, DeadAfter: o.NupaDeadAfter}), nil
	},
}

// Transports returns the valid values of NodeConfig.Transport and Planes.
func Transports() []string { return slices.Sorted(maps.Keys(transports)) }

func newTransport(name string, o TransportOptions) (rdma.Transport, error) {
	open := transports[name]
	if open == nil {
		return nil, fmt.Errorf("transport %q is not known: use %s", name, strings.Join(Transports(), ", "))
	}
	return open(o)
}
