package config

import (
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/fared/fared/fare"
	"github.com/fared/fared/wecmp"
)

// Limits of a configuration. A leaf serves many servers, so its sessions and sub-ports have separate limits.
const (
	MaxFileSize           = 1 << 20 // bytes of a configuration file
	MaxPlanes             = 64
	MaxSubPorts           = 64  // of one plane of a server
	MaxSessions           = 512 // of one server: 8 GPUs, 8 planes, 2 sub-ports, separate sessions for IPv4 and IPv6, times two
	MaxLeafSubPorts       = 1024
	MaxLeafSessions       = 1024
	MaxLoopbacksPerFamily = 72  // GPUs of one server, as of a rack
	MaxSourceGroups       = 16  // of one server
	MaxSlots              = 128 // queue pair slots of a (source loopback, destination) pair
)

// Config is the configuration of one fared process.
type Config struct {
	// server: a GPU server, which advertises its loopbacks and passes no routes on. leaf: recomputes path bandwidth and
	// readvertises routes.
	Role fare.Role `yaml:"role" default:"server"`
	// The BGP identifier, unique in the fabric, not 0.0.0.0. RFC 6286, Section 2.1.
	RouterID netip.Addr `yaml:"router_id" derived:"the first IPv4 loopback"`
	// The AS number of this process; no peer may have the same one. Not 0 (RFC 7607), 23456 (RFC 6793), 65535 or
	// 4294967295 (RFC 7300), nor 65552-131071 (reserved by IANA).
	AS uint32 `yaml:"as" min:"1" max:"4294967294" required:"true"`
	// The addresses of this server's GPUs, one each, /32 or /128, at most 72 per family. They are advertised on every
	// session of their family, or on those of their own sub-ports (planes[].sub_ports[].loopbacks). A server has at
	// least one, a leaf has none. draft-xu-rtgwg-fare-in-sun, Section 3.
	Loopbacks []netip.Prefix `yaml:"loopbacks" items:"0..144" reload:"loopbacks"`
	// The ranges of all loopbacks of the fabric, including this server's. A host route inside them is a destination; any
	// other route is dropped and counted.
	Accept []netip.Prefix `yaml:"accept" items:"1..64" required:"true"`
	// Time between the peers' receipt of zero bandwidth for a drained path and the withdrawal of its routes.
	DrainDelay time.Duration `yaml:"drain_delay" default:"5s" min:"0s" max:"1h" reload:"drain-delay"`

	// Timers and limits of all sessions.
	BGP BGP `yaml:"bgp"`
	// BFD on every session whose neighbor has it: detects a silent neighbor in a fraction of a second, where
	// bgp.hold_time takes 9 s. RFC 5880. RFC 5881.
	BFD BFD `yaml:"bfd"`
	// Links that fail again and again.
	Links Links `yaml:"links"`
	// The bandwidth in routes.
	PathBandwidth PathBandwidth `yaml:"path_bandwidth"`
	// The independent parallel networks; a plane's index is its position in the list.
	Planes []Plane `yaml:"planes" items:"1..64" required:"true"`
	// Weights, queue pair slots and UDP source ports.
	Weights Weights `yaml:"weights"`
	// The process that forwards packets.
	Dataplane Dataplane `yaml:"dataplane"`
	// The gRPC services of fared.
	API API `yaml:"api"`
	// The slot table of a server (docs/slots.md).
	SlotTable SlotTable `yaml:"slots"`
	// The file of the drains (docs/operations/drain.md).
	Drains Drains `yaml:"drains"`
	// Prometheus metrics.
	Metrics Metrics `yaml:"metrics"`
	// The live page (docs/operations/page.md).
	UI UI `yaml:"ui"`
	// Traces of incidents for OpenTelemetry (docs/operations/metrics.md).
	Traces Traces `yaml:"traces"`
	// The log, on standard error.
	Log Log `yaml:"log"`
	// The recording of every input, for fared replay.
	Record Record `yaml:"record"`
	// The start.
	Start Start `yaml:"start"`
}

// BGP holds timers and limits common to all sessions.
type BGP struct {
	// Time after which a silent peer is considered dead; whole seconds. Zero (forever, RFC 4271, Section 4.2) is not
	// allowed. A loss of carrier ends the session immediately.
	HoldTime time.Duration `yaml:"hold_time" default:"9s" min:"3s" max:"65535s"`
	// Interval between keepalives; whole seconds, at most a third of hold_time. RFC 4271, Section 4.4.
	KeepaliveInterval time.Duration `yaml:"keepalive_interval" derived:"a third of hold_time" min:"1s" max:"21845s"`
	// Longest time before the next attempt to connect; the first follow after 0, 1, 2, 4 ms and so on. RFC 4271, Section
	// 8.
	ConnectRetry time.Duration `yaml:"connect_retry" default:"1s" min:"100ms" max:"1h"`
	// Time for which a leaf may keep our routes while fared restarts, or has ended for good; whole seconds. With 0s a
	// leaf keeps none, and other servers cannot send to this one during an upgrade; fared init writes 60s. With a
	// restart time, sessions wait for the data plane. RFC 4724, Section 3.
	RestartTime time.Duration `yaml:"restart_time" default:"0s" min:"0s" max:"4095s"`
	// Permitted occurrences of our own AS in an AS path; with more, the route is ignored (RFC 4271, Section 9.1.2). 1 is
	// for servers of one AS behind a leaf without as-override. At a leaf it is 0.
	AllowOwnAS int `yaml:"allow_own_as" default:"0" min:"0" max:"10" unit:"times"`
	// Prefixes that one session may announce before it is closed with Cease, Maximum Number of Prefixes Reached. RFC
	// 4486, Section 4.
	MaxPrefixes int `yaml:"max_prefixes" default:"16384" min:"1" max:"262144" unit:"prefixes"`
}

// BFD holds the timers and keys of BFD. BFD is single-hop and asynchronous, without echo, and begins before BGP. When
// it goes down in an established session, the session is closed with Cease, BFD Down (RFC 9384), and its paths are
// removed immediately. A session whose neighbor has no BFD, or whose operator disables it, stays up without the
// protection of BFD.
type BFD struct {
	// Least interval between control packets, sent and received, whole milliseconds; the slower end determines it. One
	// second until BFD is up. 0s disables BFD. RFC 5880, Sections 6.8.2 and 6.8.3.
	Interval time.Duration `yaml:"interval" default:"300ms" min:"0s" max:"10s"`
	// Consecutive packets that may be missing before the neighbor declares the session down; the neighbor announces its
	// own. Interval times multiplier is less than bgp.hold_time. RFC 5880, Section 6.8.4.
	Multiplier int `yaml:"multiplier" default:"3" min:"1" max:"255" unit:"packets"`
	// The authentication of BFD packets on sessions without bfd_auth; if absent, none. A neighbor without the same
	// authentication has a session that BFD does not protect.
	Auth *BFDAuth `yaml:"auth"`
}

// BFDAuth configures the authentication of BFD packets (RFC 5880, Section 6.7). Both ends have the same type and keys.
// Packets that no key has signed are discarded and counted.
type BFDAuth struct {
	// The hash. meticulous: every packet has a new sequence number, so that no recorded packet can be repeated. keyed: a
	// recorded packet with the last number counts, so that its repetition hides the neighbor's silence. none, at a
	// session: packets of this session are not authenticated.
	Type string `yaml:"type" enum:"meticulous-sha1,keyed-sha1,meticulous-md5,keyed-md5,none" default:"meticulous-sha1" refused:"simple: would show its password to everyone on the link"`
	// The first key signs; every key is accepted, so that keys can be replaced one by one without an interruption.
	Keys []BFDKey `yaml:"keys" items:"1..8" reload:"bfd-keys"`
}

// BFDKey is a key of BFD authentication.
type BFDKey struct {
	// The ID of the key, the same at both ends. BIRD has no ID 0.
	ID int `yaml:"id" min:"0" max:"255" default:"0"`
	// The file of the key, at most 20 bytes for SHA1, 16 for MD5.
	KeyFile string `yaml:"key_file" required:"true"`
	// The content of KeyFile without its final newline; Load fills it in.
	Key string `yaml:"-"`
}

// The values of BFDAuth.Type.
const (
	BFDMeticulousSHA1 = "meticulous-sha1"
	BFDKeyedSHA1      = "keyed-sha1"
	BFDMeticulousMD5  = "meticulous-md5"
	BFDKeyedMD5       = "keyed-md5"
	BFDNoAuth         = "none"
)

// longestKey returns the length of the longest key of the type, in bytes, and the name of its hash.
func (a *BFDAuth) longestKey() (length int, hash string) {
	if a.Type == BFDMeticulousMD5 || a.Type == BFDKeyedMD5 {
		return 16, "MD5"
	}
	return 20, "SHA1"
}

// BFDAuth returns the authentication of a session's BFD packets, or nil if they are not authenticated.
func (c *Config) BFDAuth(s *Session) *BFDAuth {
	auth := c.BFD.Auth
	if s.BFDAuth != nil {
		auth = s.BFDAuth
	}
	if auth == nil || auth.Type == BFDNoAuth {
		return nil
	}
	return auth
}

// PathBandwidth configures the bandwidth in routes.
type PathBandwidth struct {
	// The community to send: link-bandwidth (RFC 10005) or extended-community (the FARE community with the code point
	// below). Both are accepted; the FARE community takes precedence.
	Encoding fare.Encoding `yaml:"encoding" default:"link-bandwidth"`
	// Whether Link Bandwidth is sent as type 0x00, or as 0x40, for leaves that accept only that; it ends at an AS border
	// (RFC 4360, Section 6; RFC 10005, Section 3.1). Both are accepted.
	Transitive bool `yaml:"transitive" default:"true"`
	// The Global Administrator of the Link Bandwidth to send; if absent, our AS, or 23456 (AS_TRANS) if that needs four
	// bytes. It has no meaning for a receiver. RFC 10005, Section 2.
	Administrator uint16 `yaml:"administrator" min:"1" max:"65535"`
	// Divides the values of Link Bandwidth sent, and multiplies those received: 1, 1000 or 1000000, the same at all
	// nodes. FRR through 10.7.0 sums in 32 bits of bytes a second, wrong from 34.4 Gbit/s on; with 1000 from 34 Tbit/s
	// on. A value that only another scale explains is a fault.
	Scale uint32 `yaml:"scale" default:"1" min:"1" max:"1000000"`
	// Type of the FARE community, with bit 0x40 clear. No code point is assigned; the default is for experiments (RFC
	// 9184, Section 2.1). FRR 10.3.0 and 10.3.1 drop odd types toward other AS.
	FAREType byte `yaml:"fare_type" default:"0x8e" min:"0x00" max:"0xbf"`
	// Sub-type of the FARE community. A code point that IANA has assigned to another community is an error.
	FARESubType byte `yaml:"fare_sub_type" default:"0x04" min:"0x00" max:"0xff"`
	// The bandwidth that a server advertises for its loopbacks on a session. sub-port: that of its sub-port, for leaves
	// that sum a server's sessions (FRR, fared). node: the sum of the usable sub-ports to the session's node (AS and BGP
	// identifier), for leaves that pass on their best route's value (BIRD, GoBGP); a leaf that sums counts it once per
	// session. Drained sub-ports add nothing.
	Advertise string `yaml:"advertise" enum:"sub-port,node" default:"sub-port" reload:"path-bandwidth"`
	// The rule if only some paths to a destination carry a bandwidth. local: the others count with the local link speed.
	// equal (RFC 10005, Section 4, unless configured otherwise): every usable plane gets the same weight, so one leaf
	// that strips values changes the ratio of all planes. skip: the others are not used.
	Missing fare.MissingPolicy `yaml:"missing" default:"local" reload:"path-bandwidth"`
	// The rule if no path to a destination carries a bandwidth. local: the local link speed counts. equal: every usable
	// plane gets the same weight.
	AllMissing fare.AllMissingPolicy `yaml:"all_missing" default:"local" reload:"path-bandwidth"`
	// The rule if every path to a destination has zero bandwidth: share equally, or treat it as unreachable.
	AllZero fare.ZeroPolicy `yaml:"all_zero" default:"equal" reload:"path-bandwidth"`
	// The rule if AS paths show several origins of one destination, by mistake, by hijack, or deliberately (anycast).
	// weigh: every route counts. prefer-first: only routes of the origin that has announced it for the longest
	// uninterrupted time, while one of them is usable. drop: the destination is unreachable. Each is shown as a fault.
	// The origin is the last AS of a path, which a leaf's own AS hides (docs/security.md).
	Conflict fare.ConflictPolicy `yaml:"conflict" default:"weigh" reload:"path-bandwidth"`
	// Signals of a leaf's operator with which a route counts only for a destination that no other route reaches.
	// graceful-shutdown: the community GRACEFUL_SHUTDOWN (65535:0, RFC 8326). llgr-stale: LLGR_STALE (65535:6, RFC
	// 9494). prepended: the leaf's AS at the start of the path twice, or an AS three times in a row (not with role
	// leaf).
	LeastPreferred []string `yaml:"least_preferred" enum:"graceful-shutdown,llgr-stale,prepended" default:"[graceful-shutdown, llgr-stale, prepended]" items:"0..3" reload:"path-bandwidth"`
	// Time for which an increased local speed must last before it is advertised. A decrease is advertised immediately.
	IncreaseHoldUp time.Duration `yaml:"increase_hold_up" default:"0s" min:"0s" max:"1h" reload:"path-bandwidth"`
	// Least time between two increases of the bandwidth of a route on a session. Decreases, and the first increase after
	// a quiet interval, are sent immediately. 0s means no limit. RFC 10005, Section 7.2.
	IncreaseInterval time.Duration `yaml:"increase_interval" default:"200ms" min:"0s" max:"1h"`
	// Values below it are ignored and counted. Zero bandwidth is always valid.
	Minimum fare.Bandwidth `yaml:"minimum"`
	// Values above it are ignored and counted.
	Maximum fare.Bandwidth `yaml:"maximum"`
}

// Policies returns the keys that determine the decisions of the path-bandwidth table.
func (b *PathBandwidth) Policies() fare.PolicyChange {
	signals, _ := fare.ParseSignals(b.LeastPreferred) // a valid configuration has valid signals
	return fare.PolicyChange{Missing: b.Missing, AllMissing: b.AllMissing, AllZero: b.AllZero, Conflict: b.Conflict, LeastPreferred: signals}
}

// The values of PathBandwidth.Advertise.
const (
	AdvertiseSubPort = "sub-port"
	AdvertiseNode    = "node"
)

// Plane is one of the independent parallel networks.
type Plane struct {
	// The plane's name in status, logs and metrics: letters and digits, with . _ - in between.
	Name string `yaml:"name" required:"true"`
	// Overrides path_bandwidth.minimum for this plane.
	Minimum fare.Bandwidth `yaml:"minimum" derived:"path_bandwidth.minimum"`
	// Overrides path_bandwidth.maximum for this plane.
	Maximum fare.Bandwidth `yaml:"maximum" derived:"path_bandwidth.maximum"`
	// The netdevs of this plane; a server has at most 64 per plane.
	SubPorts []SubPort `yaml:"sub_ports" items:"1..1024" required:"true"`
}

// SubPort is one physical lane of a plane: one netdev, half a Y-cable.
type SubPort struct {
	// The netdev's name, or an alternative name of it (ip link property add dev DEVICE altname NAME), at most 15 bytes,
	// which survives a rename. Unique in the file.
	Device string `yaml:"device" required:"true"`
	// The hardware of the device: pci:0000:3b:00.0 is the netdev below this PCI function, pci:0000:3b:00.0/p1 its port
	// of this name (phys_port_name), mac:02:00:00:00:00:01 the netdev with this permanent or, without one, present MAC
	// address. If absent, the name decides. The agent gives that netdev the name in device as an alternative name, so
	// choose one that no netdev has, such as p0s0.
	Match string `yaml:"match"`
	// The network namespace of the netdev, by name as in ip netns, or by path; if absent, that of fared.
	Netns string `yaml:"netns"`
	// Overrides the speed that the device reports.
	Speed fare.Bandwidth `yaml:"speed" reload:"speed"`
	// At a server: the bandwidth to advertise in place of the speed, to attract less traffic. The server's own traffic
	// does not change.
	Advertise fare.Bandwidth `yaml:"advertise"`
	// The source of the device's speed: tbf is its tbf or htb root qdisc; auto tries tbf, then ethtool, then the PCIe
	// link. Not together with speed.
	SpeedSource string `yaml:"speed_source" enum:"auto,tbf,ethtool,pcie" default:"auto"`
	// The source of the carrier state: watch queries the kernel. assume-up is for a device that this kernel does not
	// manage; only its sessions detect a failure, and it needs a speed.
	LinkState string `yaml:"link_state" enum:"watch,assume-up" default:"watch"`
	// At a leaf: the sub-port leads to a spine. Each uplink of a plane advertises only its share, by speed, of all
	// uplinks, failed ones included, because far leaves sum them. An uplink of unknown speed counts as the fastest of
	// the others. Bundle parallel cables to one spine (LAG).
	Uplink bool `yaml:"uplink" default:"false"`
	// The GPUs that this sub-port serves, from loopbacks above; if absent, all of them. Loopbacks are advertised only
	// over their sub-ports, and their packets leave only over these. Loopbacks with the same sub-ports share weights.
	// Every loopback needs a sub-port, with a session of its family. draft-xu-rtgwg-fare-in-sun, Section 1.
	Loopbacks []netip.Prefix `yaml:"loopbacks" items:"1..144"`
	// At a leaf: sub-ports of a plane with the same word divide the bandwidth by their speeds, as uplinks do (uplink:
	// true is such a word), because the advertisements of their nodes are summed further on. A super-spine uses one word
	// per pod.
	Share string `yaml:"share"`
	// The BGP sessions over this sub-port. A server has at most 512 in total, a leaf at most 1024.
	Sessions []Session `yaml:"sessions" items:"1..64" required:"true"`
}

// Session is one BGP session over one sub-port.
type Session struct {
	// The session's name in status, logs and metrics.
	Name string `yaml:"name" derived:"plane/device, then plane/device#2 and so on"`
	// The peer's address. An IPv6 link-local address belongs to the sub-port's device. Exactly one of peer and
	// unnumbered is set.
	Peer netip.Addr `yaml:"peer"`
	// The TCP port: the peer's, or our listening port if passive.
	Port uint16 `yaml:"port" default:"179" min:"1" max:"65535"`
	// Our address for the session; if absent, the kernel chooses.
	Local netip.Addr `yaml:"local"`
	// The peer's AS number, under the same rules as ours; if absent, any but ours.
	PeerAS uint32 `yaml:"peer_as" min:"1" max:"4294967294"`
	// Ranges of host routes accepted on this session, inside accept; other routes are dropped and counted
	// (route_outside_accept). With the loopbacks that this leaf may announce, the leaf cannot attract traffic of others.
	// Absent or empty means accept.
	Accept []netip.Prefix `yaml:"accept" items:"0..64"`
	// Accept routes whose next hop is another host of a subnet of the sub-port's device, from leaves with several
	// servers in one subnet (RFC 4271, Section 5.1.3). Packets still go to the peer. Otherwise such routes are dropped,
	// and are a fault (route_next_hop). The subnets are those when the session connects.
	SubnetNextHops bool `yaml:"subnet_next_hops" default:"false"`
	// Find the peer by its IPv6 router advertisements on the device (RFC 4861, Section 4.2) and use link-local
	// addresses. Where the cable has a /30 or /31 too, FRR's `neighbor X interface` refuses this session, unless it has
	// v6only.
	Unnumbered bool `yaml:"unnumbered" default:"false"`
	// Wait for the peer to connect. Of two fareds, one has to be passive.
	Passive bool `yaml:"passive" derived:"true for an unnumbered session of a leaf without a key, except over an uplink"`
	// The file of the TCP MD5 password (RFC 2385), at most 80 bytes.
	PasswordFile string `yaml:"password_file"`
	// The content of PasswordFile without its final newline; Load fills it in.
	Password string `yaml:"-"`
	// Sign the session's segments with TCP-AO (RFC 5925) instead of password_file. Without the kernel's support (Linux
	// 6.7 with CONFIG_TCP_AO) fared does not start, and fared check warns.
	TCPAO *TCPAO `yaml:"tcp_ao"`
	// The authentication of this session's BFD packets, in place of bfd.auth.
	BFDAuth *BFDAuth `yaml:"bfd_auth"`
	// At a leaf: replace the peer's AS by ours in the AS paths that are sent to it, so that servers of one AS accept
	// each other's routes. Without it, routes with the peer's AS in the path are not sent.
	ASOverride bool `yaml:"as_override" default:"false"`
	// At a leaf: the bandwidth of routes sent to this peer. regenerate: the sum of the leaf's bandwidth toward the
	// destination. keep: the communities of the best route. remove: none. With keep and remove, weights do not follow
	// failures beyond the leaf.
	Bandwidth string `yaml:"bandwidth" enum:"regenerate,keep,remove" default:"regenerate"`
	// Drop packets that have crossed more hops (RFC 5082, Section 3; 1 = directly connected); 0 disables the check. The
	// peer must send with TTL 255 (ttl-security of FRR and BIRD), as fared does.
	GTSMHops int `yaml:"gtsm_hops" default:"0" min:"0" max:"254" unit:"hops"`
	// The address families of the routes. RFC 4760, Section 8.
	Families []Family `yaml:"families" items:"1..2" enum:"ipv4,ipv6" derived:"the family of peer; both when link-local or unnumbered"`
	// Carry IPv4 routes with IPv6 next hops. RFC 8950, Section 4.
	ExtendedNextHop bool `yaml:"extended_next_hop" derived:"true when IPv4 is carried to an IPv6 peer"`
	// The format of Link Bandwidth on this session: ieee754 (RFC 10005), or uint32 for a peer with FRR's
	// disable-link-bw-encoding-ieee.
	Format fare.Format `yaml:"format" default:"ieee754"`
}

// TCPAO is the key that signs the segments of a session with TCP-AO (RFC 5925, Section 3.1). Segments of the peer that
// are not signed with it are dropped.
type TCPAO struct {
	// The file of the master key, at most 80 bytes, the same at both ends.
	KeyFile string `yaml:"key_file" required:"true"`
	// The content of KeyFile without its final newline; Load fills it in.
	Key string `yaml:"-"`
	// The KeyID of our segments: the peer's receive_id.
	SendID int `yaml:"send_id" min:"0" max:"255" default:"0"`
	// The KeyID of the peer's segments: its send_id.
	ReceiveID int `yaml:"receive_id" min:"0" max:"255" default:"0"`
	// The algorithm that derives keys and signs segments, the same at both ends. RFC 5926, Section 3.
	Algorithm string `yaml:"algorithm" enum:"hmac-sha-1-96,aes-128-cmac-96" default:"hmac-sha-1-96"`
}

// The values of TCPAO.Algorithm.
const (
	HMACSHA1   = "hmac-sha-1-96"
	AES128CMAC = "aes-128-cmac-96"
)

// Family is an address family of routes.
type Family string

// The address families.
const (
	IPv4 Family = "ipv4"
	IPv6 Family = "ipv6"
)

// The values of Session.Bandwidth.
const (
	BandwidthRegenerate = "regenerate"
	BandwidthKeep       = "keep"
	BandwidthRemove     = "remove"
)

// ShareGroup returns the name of the group of sub-ports that divide a leaf's advertised bandwidth with this one; "" means none.
func (sp *SubPort) ShareGroup() string {
	if sp.Uplink {
		return "uplink"
	}
	return sp.Share
}

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

// Weights configures the conversion of path bandwidth to weights and queue pair slots. A leaf uses only max_weight and
// max_weight_sum.
type Weights struct {
	// per-flow: each queue pair stays on one sub-port, in order. per-packet: queue pairs accept reordering, and packets are sprayed.
	// draft-xu-rtgwg-fare-in-sun, Sections 3.1 and 3.2.
	Mode wecmp.Mode `yaml:"mode" default:"per-flow"`
	// The slots of a failed plane: reweight parks them with share zero, remap moves them one by one, and moves them back
	// later.
	Policy wecmp.Policy `yaml:"policy" default:"reweight"`
	// The addresses between which queue pairs are set up: they determine the set in which source ports are unique.
	Addressing wecmp.Addressing `yaml:"addressing" default:"loopback"`
	// Slots of a pair of source loopback and destination. 0: one per sub-port in per-flow mode, one per plane in
	// per-packet mode; otherwise at least that many.
	Slots int `yaml:"slots" default:"0" min:"0" max:"128" unit:"slots"`
	// weak: any slot, weighted. partial: equal hash keys keep order. strong: an address stays on its slot. draft-xu-rtgwg-fare-in-sun, Section
	// 4.
	Ordering wecmp.Ordering `yaml:"ordering" default:"weak"`
	// The mapping of flows to sub-ports, by which source ports are chosen so that each lands on the sub-port of its
	// slot.
	Hash Hash `yaml:"hash"`
	// The largest weight that the data plane can hold; 0 means no limit.
	MaxWeight uint32 `yaml:"max_weight" default:"0" min:"0" max:"4294967295"`
	// The largest sum of weights that the data plane can hold, at least the number of sub-ports; 0 means no limit.
	MaxWeightSum uint32 `yaml:"max_weight_sum" default:"0" min:"0" max:"4294967295"`
}

// Hash configures the mapping of flows to sub-ports.
type Hash struct {
	// The hash function. dataplane: that which the data plane reports, or uniform. uniform: unknown, source ports are
	// spread evenly. linux is the kernel's (layer 4), for routes and nexthop groups that are not set up by fared; crc16
	// is CCITT, crc16-bisync is ARC.
	Algorithm string `yaml:"algorithm" enum:"dataplane,uniform,linux,crc16,crc16-bisync,crc32,xor,toeplitz" default:"dataplane"`
	// Seed of linux: the value of net.ipv4.fib_multipath_hash_seed, and not 0, with which the kernel draws a seed at
	// each boot; or seed of crc16, crc16-bisync (at most 65535) and crc32.
	Seed uint32 `yaml:"seed" default:"0" min:"0" max:"4294967295"`
	// Buckets of the resilient nexthop group that linux hashes into, at least the number of sub-ports; 0 means a plain
	// group.
	Buckets int `yaml:"buckets" default:"0" min:"0" max:"65535" unit:"buckets"`
	// Key of toeplitz: 80 to 128 hexadecimal digits, in pairs; if absent, the key of Microsoft's verification suite for
	// receive side scaling.
	Key string `yaml:"key"`
}

// The values of Hash.Algorithm, where each is described.
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

// Dataplane configures the connection to the process that forwards.
type Dataplane struct {
	// unix:/path, host:port, inside: for an agent inside this process, or memory: for a data plane that forwards
	// nothing. A leaf with memory: is only a control plane; with another address the data plane forwards by the
	// bandwidth of the next nodes, and the leaf passes no routes on before it is connected.
	Address string `yaml:"address" derived:"unix:/run/fared-dataplane/dataplane.sock, or memory: for a leaf"`
	// With inside:, flags of fared dataplane such as --driver=linux, except --flush, --log-level and --log-format.
	Flags []string `yaml:"flags" default:"[]" items:"0..64"`
	// Mutual TLS; required when address is host:port and the host is not a loopback.
	TLS *TLS `yaml:"tls"`
	// The UDP destination ports to steer: RoCEv2's 4791, SUPERp's 4444. With driver bpf source ports hold for all of
	// them, with driver linux for the first (or else of tcp_ports), unless programs ask for their service over gRPC or
	// slots.services lists it. A leaf steers nothing.
	UDPPorts []uint16 `yaml:"udp_ports" default:"[4791, 4444]" items:"0..16" min:"1" max:"65535"`
	// The TCP destination ports to steer in addition: those of queue pairs that are TCP connections.
	TCPPorts []uint16 `yaml:"tcp_ports" default:"[4793]" items:"0..16" min:"1" max:"65535"`
	// A range of TCP destination ports to steer in addition, FIRST-LAST with at most 16,384 ports, or none: those of
	// NCCL's net plugin, 4800-5055 (FARED_NCCL_PORTS), or of programs that fared exec runs, such as 32768-49151.
	TCPPortRange string `yaml:"tcp_port_range" default:"none"`
}

// maxPortRange is the greatest number of ports of dataplane.tcp_port_range.
const maxPortRange = 16384

// TCPRange returns the bounds of TCPPortRange, or an error if it has another form. Both bounds are 0 for none.
func (d *Dataplane) TCPRange() (first, last uint16, err error) {
	if d.TCPPortRange == "none" {
		return 0, 0, nil
	}
	from, to, found := strings.Cut(d.TCPPortRange, "-")
	a, errFirst := strconv.ParseUint(from, 10, 16)
	b, errLast := strconv.ParseUint(to, 10, 16)
	if !found || errFirst != nil || errLast != nil || a == 0 || b < a || b-a >= maxPortRange {
		return 0, 0, fmt.Errorf("%q is not a range FIRST-LAST of at most %d ports", d.TCPPortRange, maxPortRange)
	}
	return uint16(a), uint16(b), nil
}

// Flows returns the IP protocol number (17: UDP, 6: TCP) and the destination port of the flows for which source ports are chosen. Both are 0
// when no port is steered, which is valid only at a leaf.
func (d *Dataplane) Flows() (protocol uint8, port uint16) {
	switch {
	case len(d.UDPPorts) > 0:
		return wecmp.ProtocolUDP, d.UDPPorts[0]
	case len(d.TCPPorts) > 0:
		return wecmp.ProtocolTCP, d.TCPPorts[0]
	}
	return 0, 0
}

// API configures the addresses of fared's own gRPC services.
type API struct {
	// The unix socket for operators: it answers every call. Its group is that of the process, fared in the systemd unit.
	Socket string `yaml:"socket" default:"/run/fared/fared.sock"`
	// Permission bits of the socket, octal, quoted. Write permission allows drain, undrain, clear and reload.
	SocketMode os.FileMode `yaml:"socket_mode" default:"0660" min:"0000" max:"0777"`
	// A unix socket that answers only read calls. none disables it. Commands without access to socket use this one, if
	// it has the derived name.
	ReadOnlySocket string `yaml:"read_only_socket" derived:"socket with -ro before .sock"`
	// Permission bits of the read-only socket, octal, quoted. The default lets every local user read.
	ReadOnlySocketMode os.FileMode `yaml:"read_only_socket_mode" default:"0666" min:"0000" max:"0777"`
	// An additional host:port to listen on. Without tls it answers only read calls, since every local user may connect.
	Listen string `yaml:"listen"`
	// Mutual TLS of listen; required when its host is not a loopback.
	TLS *ServerTLS `yaml:"tls"`
}

// NoSocket is the value of API.ReadOnlySocket that disables the socket.
const NoSocket = "none"

// ReadOnlySocketOf returns the default path of the read-only socket of a socket: "-ro" is inserted before ".sock", or appended to a name with
// another ending.
func ReadOnlySocketOf(socket string) string {
	name, sock := strings.CutSuffix(socket, ".sock")
	if sock {
		return name + "-ro.sock"
	}
	return name + "-ro"
}

// SlotTable configures the slot table (docs/slots.md).
type SlotTable struct {
	// A path on a tmpfs, in a directory that outlives fared, because containers do not follow another directory at a
	// mounted path. none disables the table. /run/fared/slots means the default.
	File string `yaml:"file" derived:"/run/fared/table/slots; if api.socket is set, slots next to it"`
	// Permission bits of the file, octal, quoted. Group and others cannot have write permission, because a program that
	// truncates the file ends its readers.
	Mode os.FileMode `yaml:"mode" default:"0644" min:"0400" max:"0755"`
	// The services that the table has source ports for, such as udp/4791 and udp/4444, all of them steered (dataplane).
	// Programs that name none read those of the first. Programs of another service are refused with driver linux; with
	// driver bpf, those of a service that is not steered. If empty: the first of dataplane.udp_ports, or else of
	// dataplane.tcp_ports; and udp/4791 if it is steered.
	Services []string `yaml:"services" default:"[]" items:"0..8"`
}

// TableServices returns the services of the slot table, at least one at a server with a valid configuration.
func (c *Config) TableServices() (out []wecmp.Service) {
	for _, text := range c.SlotTable.Services {
		service, _ := ParseService(text) // a valid configuration has valid services
		out = append(out, service)
	}
	if len(out) == 0 {
		if protocol, port := c.Dataplane.Flows(); port != 0 {
			out = append(out, wecmp.Service{Protocol: protocol, Port: port})
		}
		// libfared-verbs and fared_soft0 read the table for RoCEv2, whatever the order of the ports.
		if roce := (wecmp.Service{Protocol: wecmp.ProtocolUDP, Port: 4791}); c.Dataplane.steers(roce) && !slices.Contains(out, roce) {
			out = append(out, roce)
		}
	}
	return out
}

// ParseService parses a service in the form udp/PORT or tcp/PORT.
func ParseService(text string) (wecmp.Service, error) {
	name, digits, _ := strings.Cut(text, "/")
	protocol := map[string]uint8{"udp": wecmp.ProtocolUDP, "tcp": wecmp.ProtocolTCP}[name]
	port, err := strconv.ParseUint(digits, 10, 16)
	if protocol == 0 || err != nil || port == 0 {
		return wecmp.Service{}, fmt.Errorf("%q is not a service", text)
	}
	return wecmp.Service{Protocol: protocol, Port: uint16(port)}, nil
}

// steers reports whether the packets to a service are steered.
func (d *Dataplane) steers(s wecmp.Service) bool {
	if s.Protocol == wecmp.ProtocolUDP {
		return slices.Contains(d.UDPPorts, s.Port)
	}
	first, last, err := d.TCPRange()
	return slices.Contains(d.TCPPorts, s.Port) || err == nil && first <= s.Port && s.Port <= last
}

// NoSlotTable is the value of SlotTable.File that disables the slot table.
const NoSlotTable = "none"

// The default path of the slot table, in a directory that has nothing else, for the mounts of containers; and the one of earlier versions, which is a link to it.
const (
	DefaultSlotTable = "/run/fared/table/slots"
	FormerSlotTable  = "/run/fared/slots"
)

// SlotTableOf returns the default path of the slot table of a daemon with a socket: DefaultSlotTable for the default socket, otherwise slots in the directory of the
// socket. If the socket is not named fared.sock, ".sock" of its name becomes ".slots", so that daemons that share a directory have separate tables.
func SlotTableOf(socket string) string {
	if socket == defaultSocket {
		return DefaultSlotTable
	}
	if dir, name := filepath.Split(socket); name == "fared.sock" {
		return dir + "slots"
	}
	return strings.TrimSuffix(socket, ".sock") + ".slots"
}

// Drains configures the file of the drains (docs/operations/drain.md).
type Drains struct {
	// A path on a disk, in a directory where fared may write. none: drains end with fared.
	File string `yaml:"file" derived:"/var/lib/fared/drains; if api.socket is set, drains next to it"`
}

// NoDrains is the value of Drains.File with which drains end with the daemon.
const NoDrains = "none"

// DrainsOf returns the default path of the drains of a daemon with a socket: /var/lib/fared/drains for the default socket, which is on a tmpfs; otherwise the file
// drains in the directory of the socket. If the socket is not named fared.sock, ".sock" of its name becomes ".drains".
func DrainsOf(socket string) string {
	if socket == defaultSocket {
		return "/var/lib/fared/drains"
	}
	if dir, name := filepath.Split(socket); name == "fared.sock" {
		return dir + "drains"
	}
	return strings.TrimSuffix(socket, ".sock") + ".drains"
}

// defaultSocket is the default of API.Socket.
const defaultSocket = "/run/fared/fared.sock"

// TLS names the files of mutual TLS 1.3. Replaced files count from the next connection on; until certificate and key
// belong together, the previous ones do.
type TLS struct {
	// Our certificate and its chain, PEM.
	CertFile string `yaml:"cert_file" required:"true"`
	// The certificate's private key, PEM.
	KeyFile string `yaml:"key_file" required:"true"`
	// The authorities that must have signed the peer's certificate, PEM.
	ClientCAFile string `yaml:"client_ca_file" required:"true"`
}

// ServerTLS names the files of mutual TLS 1.3, and the certificates that may do more than read. Files are replaced as
// those of dataplane.tls.
type ServerTLS struct {
	// Our certificate and its chain, PEM.
	CertFile string `yaml:"cert_file" required:"true"`
	// The certificate's private key, PEM.
	KeyFile string `yaml:"key_file" required:"true"`
	// The authorities that must have signed the peer's certificate, PEM. Every certificate of theirs may read.
	ClientCAFile string `yaml:"client_ca_file" required:"true"`
	// The certificates that may also drain, undrain, clear and reload, by a DNS name or, if they have none, their common
	// name. *.example means all names below example, * every certificate of client_ca_file.
	Operators []string `yaml:"operators" default:"[]" items:"0..64"`
}

// Metrics configures the address of the Prometheus metrics.
type Metrics struct {
	// A host:port for GET /metrics.
	Listen string `yaml:"listen"`
}

// Traces configures traces (docs/operations/metrics.md).
type Traces struct {
	// URL to which traces are sent by OTLP/HTTP, such as http://127.0.0.1:4318/v1/traces.
	Endpoint string `yaml:"endpoint"`
}

// UI configures the address of the live page (docs/operations/page.md).
type UI struct {
	// A host:port for the page, whose host is a loopback, such as 127.0.0.1:9470. Every local user may read it, and it
	// has no request that changes anything. Another machine reaches it by ssh -L.
	Listen string `yaml:"listen"`
}

// Log configures the log.
type Log struct {
	// The least important level to log.
	Level slog.Level `yaml:"level" default:"info" reload:"log-level"`
	// The format of a line.
	Format string `yaml:"format" enum:"text,json" default:"text"`
}

// Record configures the recording of inputs.
type Record struct {
	// The file to which every input is written as a JSON line. A start, and a full file, rename FILE to FILE.1, FILE.1
	// to FILE.2, and so on.
	File string `yaml:"file"`
	// The size at which the next file begins, not counting the first line.
	MaxBytes int64 `yaml:"max_bytes" default:"64MiB" min:"64KiB" max:"1TiB"`
	// Renamed files to keep; older ones are removed.
	Keep int `yaml:"keep" default:"4" min:"1" max:"100" unit:"files"`
}

// Links configures the treatment of the sub-ports' links.
type Links struct {
	// The hold of links that flap. The fall of a link counts immediately.
	Damping Damping `yaml:"damping"`
}

// Damping holds the rises of a link that fails again and again.
type Damping struct {
	// The failures in a row from which each rise of the link is held; 0 disables damping.
	Failures int `yaml:"failures" default:"4" min:"0" max:"1000" unit:"failures" reload:"links"`
	// The first hold: the link counts once it has been up for this time. It doubles with each further failure.
	Hold time.Duration `yaml:"hold" default:"500ms" min:"1ms" max:"1h" reload:"links"`
	// The longest hold.
	Longest time.Duration `yaml:"longest" default:"10s" min:"1ms" max:"1h" reload:"links"`
	// The time without a failure after which failures are no longer in a row; longer than longest.
	Quiet time.Duration `yaml:"quiet" default:"30s" min:"1ms" max:"24h" reload:"links"`
}

// Start configures the behavior of fared until it knows the fabric.
type Start struct {
	// Time to wait for the End-of-RIB of every session. Until then the plane of a session without it keeps its share, no
	// destination is removed, and watches of weights have not begun. Sessions over sub-ports that the previous process
	// has left down are not waited for. 0s: do not wait. RFC 4724, Section 2.
	Deadline time.Duration `yaml:"deadline" default:"30s" min:"0s" max:"1h"`
}
