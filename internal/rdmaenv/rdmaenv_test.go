package rdmaenv

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
)

// setup returns a server with two rails and two planes, and the given GID indexes of its four devices.
func setup(gids ...int) Setup {
	s := Setup{Interposer: "/lib/libfared-verbs.so", Rails: true}
	for i, gid := range gids {
		s.Devices = append(s.Devices, Device{
			Name: []string{"mlx5_0", "mlx5_1", "mlx5_2", "mlx5_10"}[i], Port: 1, Rail: i / 2, Plane: i % 2, GID: gid,
			Source: netip.MustParseAddr([]string{"10.255.0.1", "10.255.0.1", "10.255.0.2", "10.255.0.2"}[i]),
			Others: []netip.Addr{netip.MustParseAddr("10.1.0.1"), netip.MustParseAddr("fe80::1")},
		})
	}
	return s
}

func text(e Environment) string {
	var lines []string
	for _, v := range e.Variables {
		lines = append(lines, v.Name+"="+v.Value)
	}
	return strings.Join(lines, "\n")
}

// TestPrograms checks the variables of each program against values written by hand from the documentation of the
// program.
func TestPrograms(t *testing.T) {
	for program, want := range map[string]string{
		"nccl":     "NCCL_IB_HCA==mlx5_0:1:0:0,mlx5_1:1:0:1,mlx5_2:1:1:0,mlx5_10:1:1:1\nNCCL_IB_GID_INDEX=3\nNCCL_IBVERBS_LIB=/lib/libfared-verbs.so",
		"nccl-net": "NCCL_NET_PLUGIN=fared",
		"ucx":      "UCX_NET_DEVICES=mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_10:1\nOMPI_MCA_pml=ucx\nUCX_IB_GID_INDEX=3\nUCX_MAX_RNDV_RAILS=4\nUCX_IB_MLX5_DEVX=no\nUCX_TLS=^dc\nLD_PRELOAD=/lib/libfared-verbs.so",
		"nvshmem":  "NVSHMEM_ENABLE_NIC_PE_MAPPING=1\nNVSHMEM_HCA_LIST=mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_10:1\nNVSHMEM_IB_GID_INDEX=3",
		"deepep":   "NVSHMEM_ENABLE_NIC_PE_MAPPING=1\nNVSHMEM_HCA_LIST=mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_10:1\nNVSHMEM_IB_GID_INDEX=3",
		"mooncake": "MC_GID_INDEX=3\nMC_IB_PORT=1\nMC_ENABLE_DEST_DEVICE_AFFINITY=1\nLD_PRELOAD=/lib/libfared-verbs.so",
		"uccl":     "UCCL_IB_HCA=mlx5_0,mlx5_1,mlx5_2,mlx5_10\nUCCL_IB_GID_INDEX=3\nLD_PRELOAD=/lib/libfared-verbs.so",
		"mori":     "MORI_RDMA_DEVICES=mlx5_0,mlx5_1,mlx5_2,mlx5_10\nMORI_IB_GID_INDEX=3",
	} {
		e, ok := Of(program, setup(3, 3, 3, 3))
		if got := text(e); !ok || got != want {
			t.Errorf("%s: %v\n%s\nwant\n%s", program, ok, got, want)
		}
		if len(e.Notes) == 0 {
			t.Errorf("%s: no note about the limits of the program", program)
		}
		if !slices.Contains(Programs(), program) {
			t.Errorf("%s is not among %s", program, Programs())
		}
	}
	if _, ok := Of("mpi", setup(3)); ok {
		t.Error("mpi is known")
	}
}

// TestPluginOfNCCL checks that the plugin's ports are those that are steered, and that a configuration without such
// ports is named.
func TestPluginOfNCCL(t *testing.T) {
	for ports, want := range map[string]struct{ variables, note string }{
		"":          {"NCCL_NET_PLUGIN=fared", "must be dataplane.tcp_port_range"},
		"none":      {"NCCL_NET_PLUGIN=fared", "the configuration steers no ports"},
		"5000-5100": {"NCCL_NET_PLUGIN=fared\nFARED_NCCL_PORTS=5000-5100", "NET/fared"},
	} {
		e, ok := Of("nccl-net", Setup{TCPPorts: ports})
		if got := text(e); !ok || got != want.variables || !hasNote(e, want.note) {
			t.Errorf("%q: %v\n%s\n%q", ports, ok, got, e.Notes)
		}
	}
	if NeedsDevices("nccl-net") || !NeedsDevices("nccl") {
		t.Error("nccl needs devices, nccl-net does not")
	}
}

func hasNote(e Environment, part string) bool {
	return slices.ContainsFunc(e.Notes, func(n string) bool { return strings.Contains(n, part) })
}

// TestDifferentGIDs checks that a program with ranges of addresses selects GIDs by address where indexes differ, and
// that others get no index.
func TestDifferentGIDs(t *testing.T) {
	e, _ := Of("nccl", setup(3, 3, 5, 3))
	want := "NCCL_IB_ADDR_FAMILY=AF_INET\nNCCL_IB_ADDR_RANGE=10.255.0.0/30\nNCCL_IB_ROCE_VERSION_NUM=2"
	if got := text(e); !strings.Contains(got, want) || strings.Contains(got, "GID_INDEX") || !hasNote(e, "mlx5_0:1 3,mlx5_1:1 3,mlx5_2:1 5,mlx5_10:1 3") {
		t.Errorf("nccl:\n%s\n%s", got, strings.Join(e.Notes, "\n"))
	}
	e, _ = Of("ucx", setup(3, 3, 5, 3))
	if got := text(e); strings.Contains(got, "GID_INDEX") || !hasNote(e, "UCX_IB_GID_INDEX is one index for all devices, and these differ") {
		t.Errorf("ucx:\n%s\n%s", got, strings.Join(e.Notes, "\n"))
	}
	one := setup(3, 4)
	e, _ = Of("nvshmem", one)
	if got := text(e); !strings.Contains(got, "NVSHMEM_IB_ADDR_RANGE=10.255.0.1/32") {
		t.Errorf("one loopback:\n%s", got)
	}
	crowded := setup(3, 3, 5, 3)
	crowded.Devices[1].Others = []netip.Addr{netip.MustParseAddr("10.255.0.3")} // within 10.255.0.0/30
	e, _ = Of("nccl", crowded)
	if got := text(e); strings.Contains(got, "ADDR_RANGE") || !hasNote(e, "no range of addresses has the loopbacks alone") {
		t.Errorf("a range with another address:\n%s\n%s", got, strings.Join(e.Notes, "\n"))
	}
	mixed := setup(3, 5)
	mixed.Devices[1].Source = netip.MustParseAddr("fd00::1")
	if e, _ = Of("nccl", mixed); strings.Contains(text(e), "ADDR_RANGE") {
		t.Errorf("two families:\n%s", text(e))
	}
	mixed.Devices[0].Source = netip.MustParseAddr("fd00::2")
	if e, _ = Of("nccl", mixed); !strings.Contains(text(e), "NCCL_IB_ADDR_FAMILY=AF_INET6\nNCCL_IB_ADDR_RANGE=fd00::/126") {
		t.Errorf("IPv6:\n%s", text(e))
	}
}

// TestVariants checks a server without the interposer, older versions of NCCL, ports with several planes, and devices
// with different ports.
func TestVariants(t *testing.T) {
	s := setup(3, 3)
	s.Interposer, s.Rails = "", false
	e, _ := Of("nccl", s)
	if got := text(e); got != "NCCL_IB_HCA==mlx5_0:1,mlx5_1:1\nNCCL_IB_GID_INDEX=3" || !hasNote(e, "without libfared-verbs.so") {
		t.Errorf("without rails:\n%s", got)
	}
	if e, _ = Of("ucx", s); strings.Contains(text(e), "UCX_TLS") || strings.Contains(text(e), "LD_PRELOAD") {
		t.Errorf("without the interposer:\n%s", text(e))
	}
	s = setup(3)
	s.Devices[0].Plane = -1
	if e, _ = Of("nccl", s); !strings.HasPrefix(text(e), "NCCL_IB_HCA==mlx5_0:1:0\n") {
		t.Errorf("a port with several planes:\n%s", text(e))
	}
	s = setup(3, 3)
	s.Devices[1].Port = 2
	if e, _ = Of("mooncake", s); strings.Contains(text(e), "MC_IB_PORT") || !hasNote(e, "MC_IB_PORT is one port for all devices, and these differ: mlx5_0:1,mlx5_1:2") {
		t.Errorf("different ports:\n%s", text(e))
	}
	many := Setup{}
	for i := range 33 {
		many.Devices = append(many.Devices, Device{Name: "m" + strings.Repeat("x", i), Port: 1})
	}
	if e, _ = Of("nccl", many); !hasNote(e, "at most 32 devices, and the list has 33") {
		t.Errorf("33 devices: %s", e.Notes)
	}
}

// TestUCXOverRxe checks that UCX does not compare destinations on rdma_rxe over IPv4, and does so elsewhere.
func TestUCXOverRxe(t *testing.T) {
	for _, test := range []struct {
		driver, source string
		want           bool
	}{{"rdma_rxe", "10.255.0.1", true}, {"rdma_rxe", "fd00::1", false}, {"mlx5_core", "10.255.0.1", false}} {
		s := setup(3)
		s.Devices[0].Driver, s.Devices[0].Source = test.driver, netip.MustParseAddr(test.source)
		e, _ := Of("ucx", s)
		if got := text(e); strings.Contains(got, "UCX_UD_ETH_DGID_CHECK=n") != test.want {
			t.Errorf("%s, %s:\n%s", test.driver, test.source, got)
		}
	}
}
