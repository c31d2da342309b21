// Package rdmaenv returns the environment variables by which programs use the planes of a server: its RDMA devices and
// GIDs, or TCP connections where it has none. Each variable is documented at the cited source.
package rdmaenv

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Device is a port of an RDMA device with a GID of a loopback.
type Device struct {
	Name   string     `json:"device"`
	Driver string     `json:"-"`     // of the kernel, rdma_rxe for the software device
	Port   int        `json:"port"`  // from 1
	Rail   int        `json:"rail"`  // position of the sub-port in its plane, from 0
	Plane  int        `json:"plane"` // from 0; -1: the port serves several planes
	Source netip.Addr `json:"source"`
	GID    int        `json:"gid_index"` // of Source
	// Others are the addresses of the port's further RoCEv2 GIDs.
	Others []netip.Addr `json:"-"`
}

// Setup is the input of a program's environment.
type Setup struct {
	Devices []Device // by rail, then by plane; none twice. NeedsDevices names the programs that need one
	// Interposer is the path of libfared-verbs.so; empty means none.
	Interposer string
	// Rails is false for versions of NCCL whose list has no rails and planes.
	Rails bool
	// TCPPorts is dataplane.tcp_port_range, "none" if it steers none, and empty if it is unknown.
	TCPPorts string
}

// Variable is an environment variable.
type Variable struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// Environment is the environment of a program.
type Environment struct {
	Variables []Variable `json:"variables"`
	// Notes are facts that the variables cannot express, such as failures that the program does not follow.
	Notes []string `json:"notes"`
}

func (e *Environment) set(name, value string) {
	e.Variables = append(e.Variables, Variable{name, value})
}

func (e *Environment) note(format string, args ...any) {
	e.Notes = append(e.Notes, fmt.Sprintf(format, args...))
}

// programs have the function of each program.
var programs = map[string]func(s *Setup, e *Environment){
	"nccl": nccl, "nccl-net": ncclNet, "ucx": ucx, "nvshmem": nvshmem, "mooncake": mooncake, "uccl": uccl, "mori": mori, "deepep": deepep,
}

// Programs returns the names of the known programs, sorted.
func Programs() []string {
	var names []string
	for name := range programs {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// NeedsDevices reports whether a program uses RDMA devices.
func NeedsDevices(program string) bool { return program != "nccl-net" }

// Of returns the environment of a program, or false if it is unknown. Devices is not empty if the program needs them.
func Of(program string, s Setup) (e Environment, ok bool) {
	fn, ok := programs[program]
	if ok {
		fn(&s, &e)
	}
	return e, ok
}

// nccl: docs/userguide/source/env.rst of NCCL at 0186f08 (2.31): NCCL_IB_HCA, NCCL_IB_GID_INDEX, NCCL_IB_ADDR_FAMILY,
// NCCL_IB_ADDR_RANGE and NCCL_IB_ROCE_VERSION_NUM (since 2.21). NCCL_IBVERBS_LIB: since 2.30, also in RCCL
// (api-reference/env-variables).
func nccl(s *Setup, e *Environment) {
	e.set("NCCL_IB_HCA", "="+s.list(func(d Device) string {
		switch {
		case !s.Rails:
			return fmt.Sprintf("%s:%d", d.Name, d.Port)
		case d.Plane < 0:
			return fmt.Sprintf("%s:%d:%d", d.Name, d.Port, d.Rail)
		}
		return fmt.Sprintf("%s:%d:%d:%d", d.Name, d.Port, d.Rail, d.Plane)
	}))
	s.gid(e, "NCCL_IB", true)
	if len(s.Devices) > 32 {
		e.note("NCCL uses at most 32 devices, and the list has %d", len(s.Devices))
	}
	s.interpose(e, "NCCL_IBVERBS_LIB")
	e.note("NCCL loads libibverbs by name, so LD_PRELOAD has no effect; NCCL_IBVERBS_LIB needs NCCL 2.30")
	e.note("NCCL uses its queue pairs equally and does not read weights: planes carry their shares by the number of queue pairs (NCCL_IB_QPS_PER_CONNECTION)")
	e.note("after the failure of a device's last plane, NCCL's port recovery decides, not fared: a queue pair does not change its NIC")
}

// ncclNet: NCCL_NET_PLUGIN of docs/userguide/source/env.rst of NCCL, and the variables of libnccl-net-fared.so
// (lib/nccl/libnccl-net-fared.7).
func ncclNet(s *Setup, e *Environment) {
	e.set("NCCL_NET_PLUGIN", "fared")
	switch s.TCPPorts {
	case "":
		e.note("FARED_NCCL_PORTS is 4800-5055 by default, and must be dataplane.tcp_port_range; with --config it is set")
	case "none":
		e.note("the configuration steers no ports: without dataplane.tcp_port_range: 4800-5055 the plugin's connections take planes by the kernel's hash")
	default:
		e.set("FARED_NCCL_PORTS", s.TCPPorts)
	}
	e.note("the plugin carries host memory over TCP, with driver bpf; hosts with RDMA NICs use the environment of nccl instead")
	e.note("NCCL_DEBUG=INFO shows whether NCCL uses it: NET/fared")
}

// ucx: ucx_info -cf of UCX 1.13.1 (Debian 12). OMPI_MCA_pml: /etc/openmpi/openmpi-mca-params.conf of Open MPI 4.1.4 and
// 5.0.7 (Debian 12 and 13).
func ucx(s *Setup, e *Environment) {
	e.set("UCX_NET_DEVICES", s.list(Device.port))
	e.set("OMPI_MCA_pml", "ucx")
	e.note("Debian's Open MPI has pml = ^ucx, and takes TCP without a message: OMPI_MCA_pml=ucx makes it use UCX, or fail where UCX has none of the devices")
	e.note("mpirun passes only variables that begin with OMPI_ to other hosts, and the others by -x NAME")
	s.gid(e, "UCX_IB", false)
	if n := len(s.Devices); n > 1 {
		e.set("UCX_MAX_RNDV_RAILS", fmt.Sprint(n))
	}
	if s.Interposer != "" {
		e.set("UCX_IB_MLX5_DEVX", "no")
		e.set("UCX_TLS", "^dc")
		e.note("the interposer sees neither queue pairs that are DEVX objects nor DC, whose queue pairs have no single peer: both are off")
	}
	s.interpose(e, "LD_PRELOAD")
	if slices.ContainsFunc(s.Devices, func(d Device) bool { return d.Driver == "rdma_rxe" && d.Source.Is4() }) {
		// uct_ud_iface_check_grh takes the IP version from the service level of the completion, until pull request
		// 10209 of openucx/ucx (October 2024).
		e.set("UCX_UD_ETH_DGID_CHECK", "n")
		e.note("UCX 1.13 expects the IP version of a datagram in its completion, where rdma_rxe has 0, and drops all datagrams over IPv4 unless it does not check their destinations")
	}
	e.note("UCX ends the endpoint of a failed device with an error: it does not move to another device")
}

// nvshmem: NVSHMEMI_ENV_DEF of HCA_LIST, ENABLE_NIC_PE_MAPPING, IB_GID_INDEX, IB_ADDR_FAMILY, IB_ADDR_RANGE and
// IB_ROCE_VERSION_NUM in the sources of NVSHMEM 3; versions without the last three have the index 0 by default.
func nvshmem(s *Setup, e *Environment) {
	e.set("NVSHMEM_ENABLE_NIC_PE_MAPPING", "1")
	e.set("NVSHMEM_HCA_LIST", s.list(Device.port))
	s.gid(e, "NVSHMEM_IB", true)
	e.note("NVSHMEM has no documented variable for another libibverbs, and the GPU creates the queue pairs of IBGDA: slots have no effect on either, and source ports are those of the driver")
	e.note("processing elements get the devices in turns: with more devices than GPUs, the order of the list decides")
}

// deepep: DeepEP sends between servers by NVSHMEM with IBGDA (README of DeepEP 1), so its variables are those of
// NVSHMEM.
func deepep(s *Setup, e *Environment) {
	nvshmem(s, e)
	e.note("DeepEP 2 sends by NCCL instead: use the environment of nccl")
}

// mooncake: docs/source/design/transfer-engine of Mooncake, "Advanced Runtime Options".
func mooncake(s *Setup, e *Environment) {
	s.gid(e, "MC", false)
	if port := s.Devices[0].Port; slices.ContainsFunc(s.Devices, func(d Device) bool { return d.Port != port }) {
		e.note("MC_IB_PORT is one port for all devices, and these differ: %s", s.list(Device.port))
	} else {
		e.set("MC_IB_PORT", fmt.Sprint(port))
	}
	e.set("MC_ENABLE_DEST_DEVICE_AFFINITY", "1")
	s.interpose(e, "LD_PRELOAD")
	e.note("the program that uses Mooncake takes the devices by its own option: %s", s.list(Device.name))
	e.note("MC_ENABLE_DEST_DEVICE_AFFINITY stays on a plane only if a plane's device has one name on all servers")
	e.note("Mooncake chooses a device for each slice without weights: shares hold among the queue pairs of a device alone")
}

// uccl: docs of UCCL, "UCCL Environment Variables".
func uccl(s *Setup, e *Environment) {
	e.set("UCCL_IB_HCA", s.list(Device.name))
	s.gid(e, "UCCL_IB", false)
	s.interpose(e, "LD_PRELOAD")
	e.note("UCCL spreads messages over its own paths (UCCL_PORT_ENTROPY queue pairs for each engine) without weights: shares hold by the number of queue pairs")
}

// mori: docs/MORI-SHMEM-GUIDE.md of MORI, "Environment Variables".
func mori(s *Setup, e *Environment) {
	e.set("MORI_RDMA_DEVICES", s.list(Device.name))
	s.gid(e, "MORI_IB", false)
	e.note("MORI loads libibverbs by name from LD_LIBRARY_PATH, and GPUs drive its queue pairs: slots have no effect, and source ports are those of the driver")
}

func (d Device) name() string { return d.Name }
func (d Device) port() string { return fmt.Sprintf("%s:%d", d.Name, d.Port) }

// list joins the texts of the devices by commas, without repetition.
func (s *Setup) list(text func(Device) string) string {
	var words []string
	for _, d := range s.Devices {
		if w := text(d); !slices.Contains(words, w) {
			words = append(words, w)
		}
	}
	return strings.Join(words, ",")
}

// gid sets the index of the loopbacks' GIDs. If devices differ, the program selects the GID by its address if it can.
func (s *Setup) gid(e *Environment, prefix string, ranges bool) {
	first := s.Devices[0]
	if !slices.ContainsFunc(s.Devices, func(d Device) bool { return d.GID != first.GID }) {
		e.set(prefix+"_GID_INDEX", fmt.Sprint(first.GID))
		return
	}
	differ := s.list(func(d Device) string { return fmt.Sprintf("%s %d", d.port(), d.GID) })
	if !ranges {
		e.note("%s_GID_INDEX is one index for all devices, and these differ: %s. Use one device, or add the loopbacks of all netdevs in the same order", prefix, differ)
		return
	}
	common, ok := s.common()
	if !ok {
		e.note("the indexes of GIDs differ (%s), and no range of addresses has the loopbacks alone: add the loopbacks of all netdevs in the same order", differ)
		return
	}
	family := "AF_INET"
	if common.Addr().Is6() {
		family = "AF_INET6"
	}
	e.set(prefix+"_ADDR_FAMILY", family)
	e.set(prefix+"_ADDR_RANGE", common.String())
	e.set(prefix+"_ROCE_VERSION_NUM", "2")
	e.note("the indexes of GIDs differ: %s. The range of addresses selects them instead; leave %s_GID_INDEX unset", differ, prefix)
}

// common returns the longest prefix that has the loopbacks of all devices and no address of another GID, or false.
func (s *Setup) common() (netip.Prefix, bool) {
	first := s.Devices[0].Source
	for bits := first.BitLen(); bits > 0; bits-- {
		p, err := first.Prefix(bits)
		if err != nil {
			return p, false
		}
		if slices.ContainsFunc(s.Devices, func(d Device) bool { return !p.Contains(d.Source) }) {
			continue
		}
		return p, !slices.ContainsFunc(s.Devices, func(d Device) bool { return slices.ContainsFunc(d.Others, p.Contains) })
	}
	return netip.Prefix{}, false
}

// interpose sets the variable by which the program loads the interposer.
func (s *Setup) interpose(e *Environment, variable string) {
	if s.Interposer != "" {
		e.set(variable, s.Interposer)
		return
	}
	e.note("without libfared-verbs.so (make install-lib) the queue pairs do not use the source ports of slots")
}
