package config

import (
	"log/slog"
	"net/netip"
	"os"
	"time"

	"github.com/fared/fared/fare"
	"github.com/fared/fared/wecmp"
)

// Limits of a configuration. A leaf serves many servers, so its sessions and sub-ports have a limit of their own.
const (
	MaxFileSize           = 1 << 20 // bytes of a configuration file
	MaxPlanes             = 64
	MaxSubPorts           = 64 // of one plane of a server
	MaxSessions           = 64 // of one server
	MaxLeafSubPorts       = 1024
	MaxLeafSessions       = 1024
	MaxLoopbacksPerFamily = 8   // GPUs of one server
	MaxSlots              = 128 // queue pair slots of a (source loopback, destination) pair
)

// Config is everything that fared knows before it starts.
type Config struct {
	// What this process is: a GPU server, which advertises its own loopbacks and passes nothing on, or a leaf, which
	// recomputes path bandwidth and readvertises.
	Role fare.Role `yaml:"role" default:"server"`
	// BGP identifier, written as an IPv4 address, unique in the fabric, not 0.0.0.0. RFC 6286, Section 2.1.
	RouterID netip.Addr `yaml:"router_id" derived:"the first IPv4 loopback"`
	// Our AS number. Every session is external, so no peer may have the same one. Not 0 (RFC 7607), 23456 (RFC 6793),
	// 65535 or 4294967295 (RFC 7300), nor 65552-131071 (reserved by IANA).
	AS uint32 `yaml:"as" min:"1" max:"4294967294" required:"true"`
	// The addresses of this server's GPUs, one each, /32 or /128, at most 8 of a family. They are originated on every
	// session that carries their family. A server has at least one, a leaf has none. draft-xu-rtgwg-fare-in-sun, Section 3.
	Loopbacks []netip.Prefix `yaml:"loopbacks" items:"0..16" reload:"loopbacks"`
	// The ranges that all loopbacks of the fabric come from, this server's too. A host route inside them is a destination;
	// any other route is dropped and counted.
	Accept []netip.Prefix `yaml:"accept" items:"1..64" required:"true"`
	// How long a drained path keeps its route after its share went to zero, so that packets under way still arrive.
	DrainDelay time.Duration `yaml:"drain_delay" default:"5s" min:"0s" max:"1h" reload:"drain-delay"`

	// Timers and bounds common to all sessions.
	BGP BGP `yaml:"bgp"`
	// Bidirectional Forwarding Detection beside every session (RFC 5880, RFC 5881): a neighbour or cable that goes silent with its
	// light on is noticed in a fraction of a second; absent: off, and it takes bgp.hold_time.
	BFD *BFD `yaml:"bfd"`
	// How bandwidth is written to routes, read from them, and what holds when it is absent.
	PathBandwidth PathBandwidth `yaml:"path_bandwidth"`
	// The independent parallel networks. A plane's place in the list is its index everywhere.
	Planes []Plane `yaml:"planes" items:"1..64" required:"true"`
	// How path bandwidth becomes weights, queue pair slots and UDP source ports.
	Weights Weights `yaml:"weights"`
	// The process that forwards.
	Dataplane Dataplane `yaml:"dataplane"`
	// The gRPC services of fared itself.
	API API `yaml:"api"`
	// Prometheus metrics over HTTP.
	Metrics Metrics `yaml:"metrics"`
	// What is logged, to standard error.
	Log Log `yaml:"log"`
	// The recording of every input, which fared replay plays back.
	Record Record `yaml:"record"`
	// How fared behaves until it knows the fabric.
	Start Start `yaml:"start"`
}

// BGP holds timers and bounds common to all sessions.
type BGP struct {
	// How long a silent peer is believed to be alive; whole seconds. RFC 4271, Section 4.2, allows zero (forever) too, which
	// would leave a dead leaf unnoticed. Loss of carrier does not wait for it.
	HoldTime time.Duration `yaml:"hold_time" default:"9s" min:"3s" max:"65535s"`
	// How often we speak when there is nothing to say; whole seconds, at most a third of hold_time. RFC 4271, Section 4.4.
	KeepaliveInterval time.Duration `yaml:"keepalive_interval" derived:"a third of hold_time" min:"1s" max:"21845s"`
	// How long to wait before the next attempt to connect. RFC 4271, Section 8.
	ConnectRetry time.Duration `yaml:"connect_retry" default:"1s" min:"100ms" max:"1h"`
	// How long a leaf may keep our routes while fared restarts; whole seconds; 0s turns graceful restart off. A leaf then also
	// keeps the routes of a server that has died, which is why it is off by default. With it, sessions wait for the data plane.
	// RFC 4724, Section 3.
	RestartTime time.Duration `yaml:"restart_time" default:"0s" min:"0s" max:"4095s"`
	// Prefixes that one session may bring before it is ended with Cease, Maximum Number of Prefixes Reached. RFC 4486,
	// Section 4.
	MaxPrefixes int `yaml:"max_prefixes" default:"16384" min:"1" max:"65536" unit:"prefixes"`
}

// BFD holds the timers of BFD, which is single-hop and asynchronous, without authentication or echo. It begins when a session is
// established. When it was up and goes down, the session is closed with Cease, BFD Down (RFC 9384), and its paths are lost at
// once. A neighbour without BFD, or whose operator takes it down, loses nothing: the session is then not protected.
type BFD struct {
	// How often control packets are sent, and the fastest that they are taken, whole milliseconds; the slower end decides for both.
	// Until BFD is up it is one a second. RFC 5880, Sections 6.8.2 and 6.8.3.
	Interval time.Duration `yaml:"interval" min:"10ms" max:"10s" required:"true"`
	// How many of our packets in a row may be missing before the neighbour finds us silent. It tells us its own number for the
	// other way. Interval times multiplier is less than bgp.hold_time. RFC 5880, Section 6.8.4.
	Multiplier int `yaml:"multiplier" default:"3" min:"1" max:"255" unit:"packets"`
}

// PathBandwidth says how bandwidth travels in routes.
type PathBandwidth struct {
	// Which community is written: link-bandwidth (RFC 10005, transitive) or extended-community (the FARE community with the
	// code point below). Both are always read; of both on one route the FARE one wins.
	Encoding fare.Encoding `yaml:"encoding" default:"link-bandwidth"`
	// Type of the FARE community. Transitive, as it has to cross to another AS (bit 0x40 clear, RFC 4360, Section 2). No code
	// point is assigned; the default is for experiments (RFC 7153, Section 5.1).
	FAREType byte `yaml:"fare_type" default:"0x8f" min:"0x00" max:"0xbf"`
	// Sub-type of the FARE community.
	FARESubType byte `yaml:"fare_sub_type" default:"0x04" min:"0x00" max:"0xff"`
	// What a server says of its loopbacks on a session. sub-port: the speed of the session's sub-port, for leaves that add up what
	// they hear (FRR, fared; draft-ietf-bess-ebgp-dmz). node: the sum of all usable sub-ports to the session's node, that is, of
	// the plane's sessions with the same BGP identifier at the other end. It is for leaves that pass on the value of their best
	// route alone (BIRD, GoBGP): behind those half a Y-cable shows in no other way. Behind a leaf that adds up it would count
	// once a session, which is too much. What is drained adds nothing.
	Advertise string `yaml:"advertise" enum:"sub-port,node" default:"sub-port" reload:"path-bandwidth"`
	// When only some of the paths to a destination say their bandwidth: give every usable plane the same weight, take the
	// local link speed for the others, or skip the others. RFC 10005.
	Missing fare.MissingPolicy `yaml:"missing" default:"equal" reload:"path-bandwidth"`
	// When every path to a destination says zero: share equally, or treat the destination as unreachable.
	AllZero fare.ZeroPolicy `yaml:"all_zero" default:"equal" reload:"path-bandwidth"`
	// How long a risen local speed has to last before it is advertised. A fall is advertised at once.
	IncreaseHoldUp time.Duration `yaml:"increase_hold_up" default:"0s" min:"0s" max:"1h" reload:"path-bandwidth"`
	// Values below it are ignored and counted; absent: no lower bound. Zero bandwidth is always valid.
	Minimum fare.Bandwidth `yaml:"minimum"`
	// Values above it are ignored and counted; absent: no upper bound.
	Maximum fare.Bandwidth `yaml:"maximum"`
}

// The values of PathBandwidth.Advertise.
const (
	AdvertiseSubPort = "sub-port"
	AdvertiseNode    = "node"
)

// Plane is one of the independent parallel networks.
type Plane struct {
	// Its name in status, logs and metrics: letters, digits, and . _ - within.
	Name string `yaml:"name" required:"true"`
	// Overrides path_bandwidth.minimum for this plane.
	Minimum fare.Bandwidth `yaml:"minimum" derived:"path_bandwidth.minimum"`
	// Overrides path_bandwidth.maximum for this plane.
	Maximum fare.Bandwidth `yaml:"maximum" derived:"path_bandwidth.maximum"`
	// The netdevs of this plane. A server has at most 64 of them in a plane, a leaf at most 1024.
	SubPorts []SubPort `yaml:"sub_ports" items:"1..1024" required:"true"`
}

// SubPort is one physical lane of a plane: one netdev, half a Y-cable.
type SubPort struct {
	// The netdev's name, unique in the file, in other network namespaces too: it names the sub-port in status and drain.
	Device string `yaml:"device" required:"true"`
	// The network namespace of the netdev, by name as in ip netns, or by path; absent: the one fared runs in.
	Netns string `yaml:"netns"`
	// The sub-port's speed. It wins over what the device says; absent: ask the device.
	Speed fare.Bandwidth `yaml:"speed" reload:"speed"`
	// Who is asked for the speed of the device: tbf is its tbf or htb root qdisc, auto asks tbf, then ethtool, then the PCIe link.
	// Meaningless beside speed.
	SpeedSource string `yaml:"speed_source" enum:"auto,tbf,ethtool,pcie" default:"auto"`
	// How carrier is known: watch asks the kernel. assume-up is for a device that this kernel does not see, such as a port that a
	// user-space driver owns; only its sessions tell that it fails, and it needs a speed.
	LinkState string `yaml:"link_state" enum:"watch,assume-up" default:"watch"`
	// At a leaf: it leads to a spine. What a leaf says to a server is all that it has toward a destination. What it says to spines
	// comes together again at the other leaves, so the uplinks of a plane share it, by their speeds and whether they work or not:
	// what goes through a lost uplink or spine is missing at the far end, and half a Y-cable shows there as half. One whose speed is
	// not known yet counts as the fastest of the others. Bundle parallel cables to one spine (LAG): it takes the lowest of what one
	// neighbour says.
	Uplink bool `yaml:"uplink" default:"false"`
	// The BGP sessions over this sub-port. A server has at most 64 in total, a leaf at most 1024.
	Sessions []Session `yaml:"sessions" items:"1..64" required:"true"`
}

// Session is one BGP session over one sub-port.
type Session struct {
	// Its name in status, logs and metrics.
	Name string `yaml:"name" derived:"plane/device, then plane/device#2 and so on"`
	// The peer's address. An IPv6 link-local one lives on the sub-port's device. Exactly one of peer and unnumbered is set.
	Peer netip.Addr `yaml:"peer"`
	// The TCP port: the peer's, or the one we listen on when passive.
	Port uint16 `yaml:"port" default:"179" min:"1" max:"65535"`
	// Our own address for the session; absent: the kernel's choice.
	Local netip.Addr `yaml:"local"`
	// The peer's AS number, under the same rules as ours; absent: any but ours.
	PeerAS uint32 `yaml:"peer_as" min:"1" max:"4294967294"`
	// Find the peer by its IPv6 router advertisements on the device (RFC 4861, Section 4.2) and speak over link-local addresses.
	Unnumbered bool `yaml:"unnumbered" default:"false"`
	// Wait for the peer to connect and never connect ourselves.
	Passive bool `yaml:"passive" default:"false"`
	// A file with the TCP MD5 password (RFC 2385), at most 80 bytes, readable by its owner alone. A relative path starts at
	// the configuration file's directory.
	PasswordFile string `yaml:"password_file"`
	// The content of PasswordFile without its final newline; Load fills it in.
	Password string `yaml:"-"`
	// Drop packets that came over more than this number of hops (RFC 5082, Section 3; 1 = directly connected); 0: off.
	GTSMHops int `yaml:"gtsm_hops" default:"0" min:"0" max:"254" unit:"hops"`
	// The address families of the routes. RFC 4760, Section 8.
	Families []Family `yaml:"families" items:"1..2" enum:"ipv4,ipv6" derived:"the family of peer; both when link-local or unnumbered"`
	// Carry IPv4 routes with IPv6 next hops. RFC 8950, Section 4.
	ExtendedNextHop bool `yaml:"extended_next_hop" derived:"true when IPv4 is carried to an IPv6 peer"`
	// How the bandwidth of Link Bandwidth communities is written on this session: ieee754 (RFC 10005), or uint32 for a peer with
	// FRR's disable-link-bw-encoding-ieee.
	Format fare.Format `yaml:"format" default:"ieee754"`
}

// Family is an address family of routes.
type Family string

// The address families.
const (
	IPv4 Family = "ipv4"
	IPv6 Family = "ipv6"
)

// The values of SubPort.SpeedSource.
const (
	SpeedAuto    = "auto"
	SpeedTBF     = "tbf"
	SpeedEthtool = "ethtool"
	SpeedPCIe    = "pcie"
)

// The values of SubPort.LinkState.
const (
	LinkWatch    = "watch"
	LinkAssumeUp = "assume-up"
)

// Weights says how path bandwidth becomes weights and queue pair slots. At a leaf no queue pair begins: of these keys
// max_weight and max_weight_sum alone count there.
type Weights struct {
	// per-flow: each queue pair stays on one sub-port, in order. per-packet: queue pairs accept reordering, packets are sprayed.
	// draft-xu-rtgwg-fare-in-sun, Sections 3.1 and 3.2.
	Mode wecmp.Mode `yaml:"mode" default:"per-flow"`
	// What happens to the slots of a failed plane: reweight parks them with share zero, remap moves them one by one, and back.
	Policy wecmp.Policy `yaml:"policy" default:"reweight"`
	// Which addresses queue pairs are set up between: it decides among which of them UDP source ports are unique.
	Addressing wecmp.Addressing `yaml:"addressing" default:"loopback"`
	// Queue pair slots of a (source loopback, destination) pair. 0: one a sub-port in per-flow mode, one a plane in per-packet
	// mode; otherwise at least that many.
	Slots int `yaml:"slots" default:"0" min:"0" max:"128" unit:"slots"`
	// weak: any slot, weighted. partial: equal hash keys keep order. strong: an address stays on its slot.
	// draft-xu-rtgwg-fare-in-sun, Section 4.
	Ordering wecmp.Ordering `yaml:"ordering" default:"weak"`
	// How a flow is mapped to a sub-port, so that source ports are chosen that land on their slot's.
	Hash Hash `yaml:"hash"`
	// The largest weight that the data plane can hold; 0: no limit.
	MaxWeight uint32 `yaml:"max_weight" default:"0" min:"0" max:"4294967295"`
	// The largest sum of weights that the data plane can hold, at least the number of sub-ports; 0: no limit.
	MaxWeightSum uint32 `yaml:"max_weight_sum" default:"0" min:"0" max:"4294967295"`
}

// Hash says how a flow is mapped to a sub-port.
type Hash struct {
	// The hash function. dataplane: what the data plane says when it connects, uniform when it says nothing. uniform: not known,
	// source ports are spread evenly. linux is the kernel's (layer 4) for routes and nexthop groups that others than fared set up,
	// crc16 is CCITT, crc16-bisync is ARC.
	Algorithm string `yaml:"algorithm" enum:"dataplane,uniform,linux,crc16,crc16-bisync,crc32,xor,toeplitz" default:"dataplane"`
	// Seed of linux, the value of net.ipv4.fib_multipath_hash_seed and then not 0, which lets the kernel draw one at each boot;
	// or of crc16, crc16-bisync (at most 65535) and crc32.
	Seed uint32 `yaml:"seed" default:"0" min:"0" max:"4294967295"`
	// Buckets of the resilient nexthop group that linux hashes into, at least the number of sub-ports; 0: a plain group.
	Buckets int `yaml:"buckets" default:"0" min:"0" max:"65535" unit:"buckets"`
	// Key of toeplitz: 80 to 128 hexadecimal digits, in pairs; absent: the key of Microsoft's verification suite for receive
	// side scaling, which many devices have.
	Key string `yaml:"key"`
}

// The values of Hash.Algorithm.
const (
	HashDataplane   = "dataplane"
	HashUniform     = "uniform"
	HashLinux       = "linux"
	HashCRC16       = "crc16"
	HashCRC16Bisync = "crc16-bisync"
	HashCRC32       = "crc32"
	HashXOR         = "xor"
	HashToeplitz    = "toeplitz"
)

// Dataplane says where the process that forwards is.
type Dataplane struct {
	// unix:/path, host:port, or memory: for one inside this process that forwards nothing. A leaf with memory: is a control plane
	// alone; with another it has that forward by the bandwidth of the next nodes, and passes nothing on before it is connected.
	Address string `yaml:"address" derived:"unix:/run/fared/dataplane.sock, or memory: for a leaf"`
	// Mutual TLS; required when address is host:port and the host is not a loopback.
	TLS *TLS `yaml:"tls"`
	// The UDP destination ports that are steered; RoCEv2 has 4791. Source ports are chosen for flows to the first of them or, when
	// this is [], to the first of tcp_ports. A leaf steers nothing.
	UDPPorts []uint16 `yaml:"udp_ports" default:"[4791]" items:"0..16" min:"1" max:"65535"`
	// The TCP destination ports that are steered too: those of queue pairs that are TCP connections, such as 4793.
	TCPPorts []uint16 `yaml:"tcp_ports" default:"[]" items:"0..16" min:"1" max:"65535"`
}

// Flows returns the protocol, as IP numbers it (17: UDP, 6: TCP), and the destination port of the flows that source ports are
// chosen for. Both are 0 when no port is steered, which only a leaf may have.
func (d *Dataplane) Flows() (protocol uint8, port uint16) {
	switch {
	case len(d.UDPPorts) > 0:
		return wecmp.ProtocolUDP, d.UDPPorts[0]
	case len(d.TCPPorts) > 0:
		return wecmp.ProtocolTCP, d.TCPPorts[0]
	}
	return 0, 0
}

// API says where fared's own gRPC services are.
type API struct {
	// Path of the unix socket.
	Socket string `yaml:"socket" default:"/run/fared/fared.sock"`
	// Permission bits of the socket, octal, quoted.
	SocketMode os.FileMode `yaml:"socket_mode" default:"0660" min:"0000" max:"0777"`
	// A host:port to listen on too; absent: the socket alone.
	Listen string `yaml:"listen"`
	// Mutual TLS of listen; required when its host is not a loopback.
	TLS *TLS `yaml:"tls"`
}

// TLS names the files of mutual TLS 1.3. A relative path starts at the configuration file's directory.
type TLS struct {
	// Our certificate and its chain, PEM.
	CertFile string `yaml:"cert_file" required:"true"`
	// The certificate's private key, PEM, readable by its owner alone.
	KeyFile string `yaml:"key_file" required:"true"`
	// The authorities whose certificates the other side must have, PEM.
	ClientCAFile string `yaml:"client_ca_file" required:"true"`
}

// Metrics says where Prometheus metrics are served.
type Metrics struct {
	// A host:port for GET /metrics; absent: none.
	Listen string `yaml:"listen"`
}

// Log says what is logged.
type Log struct {
	// The least important level that is logged.
	Level slog.Level `yaml:"level" default:"info" reload:"log-level"`
	// The form of a line.
	Format string `yaml:"format" enum:"text,json" default:"text"`
}

// Record says where inputs are recorded.
type Record struct {
	// The file that every input is appended to as a JSON line; absent: no recording.
	File string `yaml:"file"`
	// The size at which the recording ends. A recording is useful from its beginning only, so it is not rotated.
	MaxBytes int64 `yaml:"max_bytes" default:"64MiB" min:"64KiB" max:"1TiB"`
}

// Start says how fared behaves until it knows the fabric.
type Start struct {
	// How long to wait for the end-of-RIB of every session before anything in effect is taken away and watches of weights begin; 0s: do
	// not wait.
	// RFC 4724, Section 2.
	Deadline time.Duration `yaml:"deadline" default:"30s" min:"0s" max:"1h"`
}
