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
	// server: advertises its GPUs' loopbacks, passes no routes on. leaf: readvertises routes with recomputed path
	// bandwidth.
	Role fare.Role `yaml:"role" default:"server"`
	// BGP identifier, unique in the fabric, not 0.0.0.0. RFC 6286, Section 2.1.
	RouterID netip.Addr `yaml:"router_id" derived:"the first IPv4 loopback"`
	// AS number, different from every peer's. Not 23456 (RFC 6793), 65535 (RFC 7300) or 65552-131071 (reserved by
	// IANA). RFC 7607.
	AS uint32 `yaml:"as" min:"1" max:"4294967294" required:"true"`
	// Addresses of this server's GPUs, one each, /32 or /128, at most 72 per family; advertised on every session of
	// their family, or on those of their sub-ports. At least one at a server, none at a leaf.
	// draft-xu-rtgwg-fare-in-sun, Section 3.
	Loopbacks []netip.Prefix `yaml:"loopbacks" items:"0..144" reload:"loopbacks"`
	// Ranges of all loopbacks of the fabric, this server's included. Host routes inside are destinations; others are
	// dropped and counted.
	Accept []netip.Prefix `yaml:"accept" items:"1..64" required:"true"`
	// Time from the peers' receipt of a drained path's zero bandwidth to the withdrawal of its routes.
	DrainDelay time.Duration `yaml:"drain_delay" default:"5s" min:"0s" max:"1h" reload:"drain-delay"`

	// Timers and limits of all sessions.
	BGP BGP `yaml:"bgp"`
	// Detects a silent neighbor sooner than bgp.hold_time. RFC 5880. RFC 5881.
	BFD BFD `yaml:"bfd"`
	// Treatment of links.
	Links Links `yaml:"links"`
	// Bandwidth in routes.
	PathBandwidth PathBandwidth `yaml:"path_bandwidth"`
	// The parallel networks; a plane's index is its position here.
	Planes []Plane `yaml:"planes" items:"1..64" required:"true"`
	// Weights, queue pair slots and UDP source ports.
	Weights Weights `yaml:"weights"`
	// Process that forwards packets.
	Dataplane Dataplane `yaml:"dataplane"`
	// gRPC services of fared.
	API API `yaml:"api"`
	// Slot table of a server (docs/slots.md).
	SlotTable SlotTable `yaml:"slots"`
	// Drains (docs/operations/drain.md).
	Drains Drains `yaml:"drains"`
	// Proofs by packets (docs/operations/proof.md).
	Proof Proof `yaml:"proof"`
	// Prometheus metrics.
	Metrics Metrics `yaml:"metrics"`
	// Live page (docs/operations/page.md).
	UI UI `yaml:"ui"`
	// Traces of incidents (docs/operations/metrics.md).
	Traces Traces `yaml:"traces"`
	// Log on standard error.
	Log Log `yaml:"log"`
	// Recording of every input, for fared replay.
	Record Record `yaml:"record"`
	// The start (docs/glossary.md).
	Start Start `yaml:"start"`
}

// BGP holds timers and limits common to all sessions.
type BGP struct {
	// Silence after which a peer counts as failed; whole seconds, not 0. A lost carrier ends the session at once. RFC
	// 4271, Section 4.2.
	HoldTime time.Duration `yaml:"hold_time" default:"9s" min:"3s" max:"65535s"`
	// Whole seconds, at most a third of hold_time. RFC 4271, Section 4.4.
	KeepaliveInterval time.Duration `yaml:"keepalive_interval" derived:"a third of hold_time" min:"1s" max:"21845s"`
	// Longest time before the next attempt to connect; the first follow after 0, 1, 2, 4 ms and so on. RFC 4271,
	// Section 8.
	ConnectRetry time.Duration `yaml:"connect_retry" default:"1s" min:"100ms" max:"1h"`
	// Time for which a leaf may keep our routes after fared has ended (docs/operations/upgrade.md); whole seconds. 0s:
	// none; fared init writes 60s. RFC 4724, Section 3.
	RestartTime time.Duration `yaml:"restart_time" default:"0s" min:"0s" max:"4095s"`
	// Occurrences of our AS in an AS path above which a route is ignored (RFC 4271, Section 9.1.2). 1: for servers of
	// one AS behind a leaf without as-override. 0 at a leaf.
	AllowOwnAS int `yaml:"allow_own_as" default:"0" min:"0" max:"10" unit:"times"`
	// A session that announces more is closed with Cease, Maximum Number of Prefixes Reached. RFC 4486, Section 4.
	MaxPrefixes int `yaml:"max_prefixes" default:"16384" min:"1" max:"262144" unit:"prefixes"`
}

// BFD holds the timers and keys of BFD. Single-hop, asynchronous, without echo; begins before BGP. When it goes down,
// the established session is closed with Cease, BFD Down (RFC 9384). A session whose neighbor has no BFD stays up
// unprotected.
type BFD struct {
	// Least interval of packets, both ways, whole milliseconds; the slower end decides. 1 s until BFD is up, 4 s
	// without a neighbor. 0s disables BFD. RFC 5880, Sections 6.8.2 and 6.8.3.
	Interval time.Duration `yaml:"interval" default:"300ms" min:"0s" max:"10s"`
	// Missing packets in a row after which the neighbor declares the session down. interval x multiplier is less than
	// bgp.hold_time. RFC 5880, Section 6.8.4.
	Multiplier int `yaml:"multiplier" default:"3" min:"1" max:"255" unit:"packets"`
	// Of sessions without bfd_auth; absent: none. A neighbor with another one: BFD does not protect the session.
	Auth *BFDAuth `yaml:"auth"`
}

// BFDAuth configures the authentication of BFD packets (RFC 5880, Section 6.7). Type and keys are the same at both
// ends. Packets that no key has signed are dropped and counted.
type BFDAuth struct {
	// meticulous: no recorded packet counts. keyed: a repeated last packet counts, and hides the neighbor's silence.
	// none, at a session: no authentication.
	Type string `yaml:"type" enum:"meticulous-sha1,keyed-sha1,meticulous-md5,keyed-md5,none" default:"meticulous-sha1" refused:"simple: would show its password to everyone on the link"`
	// The first signs, all are accepted: keys can be replaced one by one.
	Keys []BFDKey `yaml:"keys" items:"1..8" reload:"bfd-keys"`
}

// BFDKey is a key of BFD authentication.
type BFDKey struct {
	// The same at both ends. BIRD has no ID 0.
	ID int `yaml:"id" min:"0" max:"255" default:"0"`
	// File of the key, at most 20 bytes for SHA1, 16 for MD5.
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
	// Community to send: link-bandwidth (RFC 10005) or extended-community (FARE, with the code point below). Both are
	// accepted, FARE first.
	Encoding fare.Encoding `yaml:"encoding" default:"link-bandwidth"`
	// Send Link Bandwidth as type 0x00; false: as 0x40, which ends at an AS border (RFC 4360, Section 6), for leaves
	// that accept only that. Both are accepted. RFC 10005, Section 3.1.
	Transitive bool `yaml:"transitive" default:"true"`
	// Global Administrator of sent Link Bandwidth; absent: our AS, or 23456 (AS_TRANS) if that needs four bytes.
	// Receivers ignore it. RFC 10005, Section 2.
	Administrator uint16 `yaml:"administrator" min:"1" max:"65535"`
	// Divides sent and multiplies received Link Bandwidth: 1, 1000 or 1000000, the same at all nodes. Sums of FRR
	// through 10.7.0 are wrong from 34.4 Gbit/s on, with 1000 from 34 Tbit/s on.
	Scale uint32 `yaml:"scale" default:"1" min:"1" max:"1000000"`
	// Type of the FARE community, bit 0x40 clear; none is assigned, the default is for experiments. FRR 10.3.0 and
	// 10.3.1 drop odd types toward other AS. RFC 9184, Section 2.1.
	FAREType byte `yaml:"fare_type" default:"0x8e" min:"0x00" max:"0xbf"`
	// Sub-type of the FARE community; not a code point that IANA has assigned to another.
	FARESubType byte `yaml:"fare_sub_type" default:"0x04" min:"0x00" max:"0xff"`
	// A server's bandwidth on a session. sub-port: of the sub-port, for leaves that sum (FRR, fared). node: of all
	// usable sub-ports to the session's node (AS and BGP identifier), for leaves that do not (BIRD, GoBGP); others
	// count it once per session. Drained sub-ports add nothing.
	Advertise string `yaml:"advertise" enum:"sub-port,node" default:"sub-port" reload:"path-bandwidth"`
	// If only some paths to a destination carry a bandwidth. local: the others count with the local link speed. equal
	// (RFC 10005, Section 4): all usable planes get the same weight; one leaf that strips values changes every ratio.
	// skip: the others are not used.
	Missing fare.MissingPolicy `yaml:"missing" default:"local" reload:"path-bandwidth"`
	// If no path carries a bandwidth. local: the local link speed counts. equal: all usable planes get the same weight.
	AllMissing fare.AllMissingPolicy `yaml:"all_missing" default:"local" reload:"path-bandwidth"`
	// If every path has zero bandwidth.
	AllZero fare.ZeroPolicy `yaml:"all_zero" default:"equal" reload:"path-bandwidth"`
	// If AS paths show several origins of a destination (mistake, hijack, anycast); always a fault. weigh: every route
	// counts. prefer-first: those of the origin that has announced it longest, while one is usable. drop: unreachable
	// (docs/security.md).
	Conflict fare.ConflictPolicy `yaml:"conflict" default:"weigh" reload:"path-bandwidth"`
	// Signals with which a route counts only for destinations that no other route reaches: GRACEFUL_SHUTDOWN (65535:0,
	// RFC 8326), LLGR_STALE (65535:6, RFC 9494), or, as prepended, the leaf's AS twice at the start of the path or an
	// AS three times in a row (not with role leaf).
	LeastPreferred []string `yaml:"least_preferred" enum:"graceful-shutdown,llgr-stale,prepended" default:"[graceful-shutdown, llgr-stale, prepended]" items:"0..3" reload:"path-bandwidth"`
	// Time that a higher local speed must last before it is advertised. A lower one is at once.
	IncreaseHoldUp time.Duration `yaml:"increase_hold_up" default:"0s" min:"0s" max:"1h" reload:"path-bandwidth"`
	// Least time between increases of a route's bandwidth on a session. Decreases are sent at once. 0s: no limit. RFC
	// 10005, Section 7.2.
	IncreaseInterval time.Duration `yaml:"increase_interval" default:"200ms" min:"0s" max:"1h"`
	// Lower values are ignored and counted; zero is always valid.
	Minimum fare.Bandwidth `yaml:"minimum"`
	// Higher values are ignored and counted.
	Maximum fare.Bandwidth `yaml:"maximum"`
}

// Policies returns the keys that determine the decisions of the path-bandwidth table.
func (c *Config) Policies() fare.PolicyChange {
	b := &c.PathBandwidth
	signals, _ := fare.ParseSignals(b.LeastPreferred) // a valid configuration has valid signals
	return fare.PolicyChange{
		Missing: b.Missing, AllMissing: b.AllMissing, AllZero: b.AllZero, Conflict: b.Conflict, LeastPreferred: signals, Unproved: c.Proof.Unproved,
	}
}

// The values of PathBandwidth.Advertise.
const (
	AdvertiseSubPort = "sub-port"
	AdvertiseNode    = "node"
)

// Plane is one of the independent parallel networks.
type Plane struct {
	// Name in status, logs and metrics: letters and digits, with . _ - in between.
	Name string `yaml:"name" required:"true" reload:"planes"`
	// For this plane.
	Minimum fare.Bandwidth `yaml:"minimum" derived:"path_bandwidth.minimum" reload:"planes"`
	// For this plane.
	Maximum fare.Bandwidth `yaml:"maximum" derived:"path_bandwidth.maximum" reload:"planes"`
	// Netdevs of this plane; at most 64 at a server.
	SubPorts []SubPort `yaml:"sub_ports" items:"1..1024" required:"true"`
}

// SubPort is one physical lane of a plane: one netdev, half a Y-cable.
type SubPort struct {
	// The netdev's name, or an alternative one, which survives a rename; at most 15 bytes, unique in the
	// file.
	Device string `yaml:"device" required:"true" reload:"planes"`
	// The device by hardware or pattern (docs/operations/configure.md): pci:0000:3b:00.0, pci:0000:3b:00.0/p1,
	// mac:02:00:00:00:00:01, rdma:mlx5_3, or name:enp*s0f0np0. Absent: by name. The agent gives it the alternative name
	// in device.
	Match string `yaml:"match" reload:"planes"`
	// Network namespace, by name (ip netns) or path; absent: fared's.
	Netns string `yaml:"netns" reload:"planes"`
	// Overrides the device's speed.
	Speed fare.Bandwidth `yaml:"speed" reload:"speed"`
	// At a server: advertised in place of the speed, to attract less traffic. Its sent traffic does not change.
	Advertise fare.Bandwidth `yaml:"advertise" reload:"planes"`
	// tbf: the device's tbf or htb root qdisc. pcie: the PCIe link. auto: tbf, then ethtool, then pcie. Not together
	// with speed.
	SpeedSource string `yaml:"speed_source" enum:"auto,tbf,ethtool,pcie" default:"auto" reload:"planes"`
	// watch: the kernel's carrier. assume-up: for a device that this kernel does not manage; only its sessions detect a
	// failure, and it needs a speed.
	LinkState string `yaml:"link_state" enum:"watch,assume-up" default:"watch" reload:"planes"`
	// At a leaf: leads to a spine, and advertises only its share (docs/operations/leaves.md).
	Uplink bool `yaml:"uplink" default:"false" reload:"planes"`
	// GPUs that this sub-port serves, of the top level's; absent: all. A loopback is advertised, and its packets leave,
	// only over its sub-ports; it needs one with a session of its family. draft-xu-rtgwg-fare-in-sun, Section 1.
	Loopbacks []netip.Prefix `yaml:"loopbacks" items:"1..144" reload:"planes"`
	// At a leaf: sub-ports of a plane with the same word divide the bandwidth by speed, as uplinks do
	// (docs/operations/leaves.md).
	Share string `yaml:"share" reload:"planes"`
	// BGP sessions; in total at most 512 at a server, 1024 at a leaf.
	Sessions []Session `yaml:"sessions" items:"1..64" required:"true"`
}

// Session is one BGP session over one sub-port.
type Session struct {
	// Name in status, logs and metrics.
	Name string `yaml:"name" derived:"plane/device, then plane/device#2 and so on" reload:"planes"`
	// The peer's address, of the sub-port's device if IPv6 link-local. Exactly one of peer and unnumbered is set.
	Peer netip.Addr `yaml:"peer" reload:"planes"`
	// TCP port: the peer's, or ours if passive.
	Port uint16 `yaml:"port" default:"179" min:"1" max:"65535" reload:"planes"`
	// Our address; absent: the kernel chooses.
	Local netip.Addr `yaml:"local" reload:"planes"`
	// The peer's AS, under the rules of as; absent: any but ours.
	PeerAS uint32 `yaml:"peer_as" min:"1" max:"4294967294" reload:"planes"`
	// Ranges of accepted host routes, inside the top level's; others are dropped and counted (route_outside_accept).
	// With its loopbacks alone, a leaf cannot attract traffic of others. Absent or empty: the top level's.
	Accept []netip.Prefix `yaml:"accept" items:"0..64" reload:"planes"`
	// Accept next hops that are other hosts of the device's subnets, for leaves with several servers in one
	// (docs/operations/leaves.md); packets still go to the peer. Subnets are read when the session connects. RFC 4271,
	// Section 5.1.3.
	SubnetNextHops bool `yaml:"subnet_next_hops" default:"false" reload:"planes"`
	// Find the peer by its IPv6 router advertisements (RFC 4861, Section 4.2) and use link-local addresses
	// (docs/operations/leaves.md).
	Unnumbered bool `yaml:"unnumbered" default:"false" reload:"planes"`
	// Wait for the peer to connect. Of two fareds, one has to be passive.
	Passive bool `yaml:"passive" derived:"true for an unnumbered session of a leaf without a key, except over an uplink" reload:"planes"`
	// File of the TCP MD5 password (RFC 2385), at most 80 bytes.
	PasswordFile string `yaml:"password_file" reload:"planes"`
	// The content of PasswordFile without its final newline; Load fills it in.
	Password string `yaml:"-"`
	// TCP-AO (RFC 5925) instead of password_file; needs Linux 6.7 with CONFIG_TCP_AO.
	TCPAO *TCPAO `yaml:"tcp_ao"`
	// In place of bfd.auth.
	BFDAuth *BFDAuth `yaml:"bfd_auth"`
	// At a leaf: replace the peer's AS by ours in paths sent to it, for servers of one AS. Without it, routes with the
	// peer's AS are not sent.
	ASOverride bool `yaml:"as_override" default:"false" reload:"planes"`
	// At a leaf: bandwidth of routes to this peer. regenerate: the leaf's sum. keep: the best route's communities.
	// remove: none. With keep and remove, weights do not follow failures beyond the leaf.
	Bandwidth string `yaml:"bandwidth" enum:"regenerate,keep,remove" default:"regenerate" reload:"planes"`
	// Drop packets that have crossed more hops (1: directly connected); 0: no check. The peer must send TTL 255
	// (ttl-security of FRR and BIRD), as fared does. RFC 5082, Section 3.
	GTSMHops int `yaml:"gtsm_hops" default:"0" min:"0" max:"254" unit:"hops" reload:"planes"`
	// Address families of the routes. RFC 4760, Section 8.
	Families []Family `yaml:"families" items:"1..2" enum:"ipv4,ipv6" derived:"the family of peer; both when link-local or unnumbered" reload:"planes"`
	// IPv4 routes with IPv6 next hops. RFC 8950, Section 4.
	ExtendedNextHop bool `yaml:"extended_next_hop" derived:"true when IPv4 is carried to an IPv6 peer" reload:"planes"`
	// Of Link Bandwidth: ieee754 (RFC 10005), or uint32 for FRR's disable-link-bw-encoding-ieee.
	Format fare.Format `yaml:"format" default:"ieee754" reload:"planes"`
}

// TCPAO is the key that signs the segments of a session with TCP-AO (RFC 5925, Section 3.1). Segments of the peer that
// are not signed with it are dropped.
type TCPAO struct {
	// File of the master key, at most 80 bytes, the same at both ends.
	KeyFile string `yaml:"key_file" required:"true" reload:"planes"`
	// The content of KeyFile without its final newline; Load fills it in.
	Key string `yaml:"-"`
	// KeyID of our segments: the peer's receive_id.
	SendID int `yaml:"send_id" min:"0" max:"255" default:"0" reload:"planes"`
	// KeyID of the peer's segments: its send_id.
	ReceiveID int `yaml:"receive_id" min:"0" max:"255" default:"0" reload:"planes"`
	// Derives keys and signs segments, the same at both ends. RFC 5926, Section 3.
	Algorithm string `yaml:"algorithm" enum:"hmac-sha-1-96,aes-128-cmac-96" default:"hmac-sha-1-96" reload:"planes"`
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

// ShareGroup returns the name of the group of sub-ports that divide a leaf's advertised bandwidth with this one; ""
// means none.
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
	// per-flow: each queue pair stays on one sub-port, in order. per-packet: packets are sprayed, queue pairs accept
	// reordering. draft-xu-rtgwg-fare-in-sun, Sections 3.1 and 3.2.
	Mode wecmp.Mode `yaml:"mode" default:"per-flow"`
	// Slots of a failed plane: reweight parks them with share zero, remap moves them one by one, and later back.
	Policy wecmp.Policy `yaml:"policy" default:"reweight"`
	// Addresses between which queue pairs are set up, and for which source ports are unique.
	Addressing wecmp.Addressing `yaml:"addressing" default:"loopback"`
	// Slots per source loopback and destination. 0: one per sub-port in mode per-flow, per plane in per-packet;
	// otherwise at least that many.
	Slots int `yaml:"slots" default:"0" min:"0" max:"128" unit:"slots"`
	// weak: any slot, weighted. partial: equal hash keys keep order. strong: an address stays on its slot.
	// draft-xu-rtgwg-fare-in-sun, Section 4.
	Ordering wecmp.Ordering `yaml:"ordering" default:"weak"`
	// Mapping of flows to sub-ports, by which the slots' source ports are chosen.
	Hash Hash `yaml:"hash"`
	// Largest weight that the data plane can hold; 0: no limit.
	MaxWeight uint32 `yaml:"max_weight" default:"0" min:"0" max:"4294967295"`
	// Largest sum of weights, at least the number of sub-ports; 0: no limit.
	MaxWeightSum uint32 `yaml:"max_weight_sum" default:"0" min:"0" max:"4294967295"`
}

// Hash configures the mapping of flows to sub-ports.
type Hash struct {
	// dataplane: as the data plane reports, else uniform. uniform: unknown, source ports are spread evenly. linux: the
	// kernel's (layer 4), for nexthop groups and routes not set up by fared. crc16: CCITT. crc16-bisync: ARC.
	Algorithm string `yaml:"algorithm" enum:"dataplane,uniform,linux,crc16,crc16-bisync,crc32,xor,toeplitz" default:"dataplane"`
	// Of linux: net.ipv4.fib_multipath_hash_seed, not 0. Of crc16, crc16-bisync (at most 65535) and crc32: their seed.
	Seed uint32 `yaml:"seed" default:"0" min:"0" max:"4294967295"`
	// Of the resilient nexthop group that linux hashes into, at least the number of sub-ports; 0: a plain group.
	Buckets int `yaml:"buckets" default:"0" min:"0" max:"65535" unit:"buckets"`
	// Of toeplitz: 80 to 128 hexadecimal digits, in pairs; absent: that of Microsoft's verification suite for RSS.
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
	// unix:/path, host:port, inside: (an agent in this process) or memory: (forwards nothing). A leaf with another
	// address than memory: passes no routes on before the data plane is connected.
	Address string `yaml:"address" derived:"unix:/run/fared-dataplane/dataplane.sock, or memory: for a leaf"`
	// With inside:, flags of fared dataplane such as --driver=linux, except --flush, --log-level and --log-format.
	Flags []string `yaml:"flags" default:"[]" items:"0..64"`
	// Mutual TLS; required for a host:port that is no loopback.
	TLS *TLS `yaml:"tls"`
	// UDP destination ports to steer: RoCEv2's 4791, SUPERp's 4444. Their source ports: docs/dataplane.md. A leaf
	// steers nothing.
	UDPPorts []uint16 `yaml:"udp_ports" default:"[4791, 4444]" items:"0..16" min:"1" max:"65535"`
	// TCP destination ports to steer: those of queue pairs that are TCP connections.
	TCPPorts []uint16 `yaml:"tcp_ports" default:"[4793]" items:"0..16" min:"1" max:"65535"`
	// More TCP destination ports to steer, FIRST-LAST, at most 16,384 (docs/nccl.md, docs/tcp.md).
	TCPPortRange string `yaml:"tcp_port_range" default:"none"`
	// Give a sub-port's device that was away (in a container, or by a reload of its driver) its addresses back. Without
	// it they are a fault.
	RestoreAddresses bool `yaml:"restore_addresses" default:"false"`
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

// Flows returns the IP protocol number (17: UDP, 6: TCP) and the destination port of the flows for which source ports
// are chosen. Both are 0 when no port is steered, which is valid only at a leaf.
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
	// Unix socket for operators: answers every call. Its group is the process's, fared in the systemd unit.
	Socket string `yaml:"socket" default:"/run/fared/fared.sock"`
	// Octal, quoted. Write permission allows drain, undrain, clear and reload.
	SocketMode os.FileMode `yaml:"socket_mode" default:"0660" min:"0000" max:"0777"`
	// Unix socket for read calls; none disables it. Commands without access to socket use it under its default name.
	ReadOnlySocket string `yaml:"read_only_socket" derived:"socket with -ro before .sock"`
	// Octal, quoted.
	ReadOnlySocketMode os.FileMode `yaml:"read_only_socket_mode" default:"0666" min:"0000" max:"0777"`
	// An additional host:port. Without tls it answers only read calls, since every local user may connect.
	Listen string `yaml:"listen"`
	// Mutual TLS of listen; required unless that is a loopback.
	TLS *ServerTLS `yaml:"tls"`
}

// NoSocket is the value of API.ReadOnlySocket that disables the socket.
const NoSocket = "none"

// ReadOnlySocketOf returns the default path of the read-only socket of a socket: "-ro" is inserted before ".sock", or
// appended to a name with another ending.
func ReadOnlySocketOf(socket string) string {
	name, sock := strings.CutSuffix(socket, ".sock")
	if sock {
		return name + "-ro.sock"
	}
	return name + "-ro"
}

// SlotTable configures the slot table (docs/slots.md).
type SlotTable struct {
	// A path on a tmpfs, in a directory that outlives fared, for containers that mount it. none disables the table.
	// /run/fared/slots means the default.
	File string `yaml:"file" derived:"/run/fared/table/slots; if api.socket is set, slots next to it"`
	// Octal, quoted. No write permission for group and others: a program that truncates the file ends its readers.
	Mode os.FileMode `yaml:"mode" default:"0644" min:"0400" max:"0755"`
	// Steered services that the table has source ports for, such as udp/4791; programs that name none read the first
	// (docs/slots.md). Empty: the first of dataplane.udp_ports, or else of tcp_ports; and udp/4791 if it is steered.
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

// The default path of the slot table, in a directory that has nothing else, for the mounts of containers; and the one
// of earlier versions, which is a link to it.
const (
	DefaultSlotTable = "/run/fared/table/slots"
	FormerSlotTable  = "/run/fared/slots"
)

// SlotTableOf returns the default path of the slot table of a daemon with a socket: DefaultSlotTable for the default
// socket, otherwise slots in the directory of the socket. If the socket is not named fared.sock, ".sock" of its name
// becomes ".slots", so that daemons that share a directory have separate tables.
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
	// A file on a disk, in a directory where fared may write. none: drains end with fared.
	File string `yaml:"file" derived:"/var/lib/fared/drains; if api.socket is set, drains next to it"`
}

// Proof configures probes: packets from the source ports of slots to the loopbacks of other servers, and their answers.
type Proof struct {
	// Send and answer probes. false: planes are shown as not proved, here and at the peers. A leaf sends none.
	Enabled bool `yaml:"enabled" default:"true"`
	// UDP port of probes and answers, at the loopbacks; the same at all servers. Steered like dataplane.udp_ports; open
	// it in firewalls.
	Port uint16 `yaml:"port" default:"4796" min:"1" max:"65535"`
	// Send packets with the ports of queue pairs, too (slots.services), to see by which device the kernel sends them:
	// at most one a second by each sub-port. Their time to live is 1: leaves count them as expired.
	Services bool `yaml:"services" default:"true"`
	// Probes a second; 0: 24, with more than 64 destinations 50.
	Rate int `yaml:"rate" default:"0" min:"0" max:"1000" unit:"probes"`
	// If all probes by a plane toward a destination are lost while another plane's are answered. report: a finding.
	// avoid: the plane also has weight 0 toward it until its probes are answered, unless no other plane is left.
	Unproved fare.UnprovedPolicy `yaml:"unproved" default:"report" reload:"proof"`
	// Time that the probes must be lost before the plane is avoided.
	AvoidAfter time.Duration `yaml:"avoid_after" default:"400ms" min:"100ms" max:"60s" reload:"proof"`
	// Authenticate probes and answers (HMAC-SHA256); the same at all servers. The first signs, all are accepted: keys
	// can be replaced one by one.
	Keys []ProofKey `yaml:"keys" items:"0..4" reload:"proof-keys"`
}

// ProofKey is a key of probes.
type ProofKey struct {
	// File of the key, 16 to 64 bytes.
	KeyFile string `yaml:"key_file" required:"true"`
	// The content of KeyFile without its final newline; Load fills it in.
	Key string `yaml:"-"`
}

// Proves reports whether the configuration has probes.
func (c *Config) Proves() bool {
	return c.Role == fare.RoleServer && c.Proof.Enabled && c.Forwards() && c.Dataplane.Address != MemoryDataplane
}

// NoDrains is the value of Drains.File with which drains end with the daemon.
const NoDrains = "none"

// DrainsOf returns the default path of the drains of a daemon with a socket: /var/lib/fared/drains for the default
// socket, which is on a tmpfs; otherwise the file drains in the directory of the socket. If the socket is not named
// fared.sock, ".sock" of its name becomes ".drains".
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

// TLS names the files of mutual TLS 1.3. Replaced files count from the next connection on, once certificate and key
// belong together.
type TLS struct {
	// Our certificate and its chain, PEM.
	CertFile string `yaml:"cert_file" required:"true"`
	// Private key of cert_file, PEM.
	KeyFile string `yaml:"key_file" required:"true"`
	// Authorities of the peer's certificate, PEM.
	ClientCAFile string `yaml:"client_ca_file" required:"true"`
}

// ServerTLS names the files of mutual TLS 1.3, and the certificates that may do more than read. Files are replaced as
// those of dataplane.tls.
type ServerTLS struct {
	// Our certificate and its chain, PEM.
	CertFile string `yaml:"cert_file" required:"true"`
	// Private key of cert_file, PEM.
	KeyFile string `yaml:"key_file" required:"true"`
	// Authorities of the peer's certificate, PEM. Every certificate of theirs may read.
	ClientCAFile string `yaml:"client_ca_file" required:"true"`
	// Certificates that may also drain, undrain, clear and reload, by name (docs/operations/install.md).
	Operators []string `yaml:"operators" default:"[]" items:"0..64"`
}

// Metrics configures the address of the Prometheus metrics.
type Metrics struct {
	// host:port of /metrics.
	Listen string `yaml:"listen"`
}

// Traces configures traces (docs/operations/metrics.md).
type Traces struct {
	// URL of OTLP/HTTP, such as http://127.0.0.1:4318/v1/traces.
	Endpoint string `yaml:"endpoint"`
}

// UI configures the address of the live page (docs/operations/page.md).
type UI struct {
	// host:port of a loopback, such as 127.0.0.1:9470.
	Listen string `yaml:"listen"`
}

// Log configures the log.
type Log struct {
	// Least important level to log.
	Level slog.Level `yaml:"level" default:"info" reload:"log-level"`
	// Format of a line.
	Format string `yaml:"format" enum:"text,json" default:"text"`
}

// Record configures the recording of inputs.
type Record struct {
	// Every input as a JSON line. A start, and a full file, rename FILE to FILE.1 and so on.
	File string `yaml:"file"`
	// Size at which the next file begins, not counting the first line.
	MaxBytes int64 `yaml:"max_bytes" default:"64MiB" min:"64KiB" max:"1TiB"`
	// Renamed files to keep.
	Keep int `yaml:"keep" default:"4" min:"1" max:"100" unit:"files"`
}

// Links configures the treatment of the sub-ports' links.
type Links struct {
	// Holds links that flap. The fall of a link counts at once.
	Damping Damping `yaml:"damping"`
}

// Damping holds the rises of a link that fails again and again.
type Damping struct {
	// Failures in a row from which each rise of the link is held; 0 disables damping.
	Failures int `yaml:"failures" default:"4" min:"0" max:"1000" unit:"failures" reload:"links"`
	// First hold: the link counts once it has been up for this time. It doubles with each further failure.
	Hold time.Duration `yaml:"hold" default:"500ms" min:"1ms" max:"1h" reload:"links"`
	// Longest hold.
	Longest time.Duration `yaml:"longest" default:"10s" min:"1ms" max:"1h" reload:"links"`
	// Time without a failure that ends a row of failures; longer than longest.
	Quiet time.Duration `yaml:"quiet" default:"30s" min:"1ms" max:"24h" reload:"links"`
}

// Start configures the behavior of fared until it knows the fabric.
type Start struct {
	// Longest wait for every session's End-of-RIB, after which destinations without a route are removed and watches of
	// weights begin. RFC 4724, Section 2.
	Deadline time.Duration `yaml:"deadline" default:"30s" min:"0s" max:"1h"`
}
