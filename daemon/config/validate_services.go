package config

import (
	"fmt"
	"net/netip"
	"net/url"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/fared/fared/daemon/config/internal/model"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/internal/tlsfiles"
	"github.com/fared/fared/wecmp"
)

// services checks the addresses of the services that fared offers and uses.
func (p *problems) services(c *Config) {
	d, api := &c.Dataplane, &c.API
	switch {
	case d.Address == "" || d.Address == MemoryDataplane:
		p.unused("dataplane.tls", d.TLS != nil, "dataplane.address is memory:, in this process")
	case d.Address == InsideDataplane:
		p.unused("dataplane.tls", d.TLS != nil, "dataplane.address is inside:, in this process")
	case strings.HasPrefix(d.Address, "unix:"):
		p.socket("dataplane.address", strings.TrimPrefix(d.Address, "unix:"), "unix:/run/fared-dataplane/dataplane.sock")
		p.unused("dataplane.tls", d.TLS != nil, "dataplane.address is a unix socket")
	default:
		host, ok := p.endpoint("dataplane.address", d.Address, "use unix:/path, inside:, memory: or host:port, such as 192.0.2.1:7777")
		if ok && host == "" {
			p.add("dataplane.address", d.Address+" has no host", "write the data plane's host, such as 192.0.2.1"+d.Address)
		} else if ok && !loopbackHost(host) && d.TLS == nil {
			p.add("dataplane.tls", "is missing, but "+d.Address+" is not a loopback", "write cert_file, key_file and client_ca_file")
		}
	}
	if len(d.Flags) > 0 && d.Address != InsideDataplane {
		p.add("dataplane.flags", "is set, but dataplane.address is not inside:", "remove it, or write address: \"inside:\"")
	}
	if c.Proof.Unproved == fare.UnprovedAvoid && !c.Proof.Enabled {
		p.add("proof.unproved", "is avoid, but no probes are sent", "write report, or proof.enabled: true")
	}
	for i, flag := range d.Flags {
		if !strings.HasPrefix(flag, "--") || strings.ContainsAny(flag, " \t\n") {
			p.add(item("dataplane.flags", i), fmt.Sprintf("%q is not a flag", flag), "write one such as --driver=linux")
		}
	}
	for _, list := range []struct {
		path  string
		ports []uint16
	}{{"dataplane.udp_ports", d.UDPPorts}, {"dataplane.tcp_ports", d.TCPPorts}} {
		for i, port := range list.ports {
			if port != 0 && slices.Contains(list.ports[:i], port) {
				p.add(item(list.path, i), fmt.Sprintf("%d is listed twice", port), "list it once")
			}
		}
	}
	if first, last, err := d.TCPRange(); err != nil {
		p.add("dataplane.tcp_port_range", err.Error(), "write one such as 4800-5055, or none")
	} else if i := slices.IndexFunc(d.TCPPorts, func(port uint16) bool { return first <= port && port <= last }); i >= 0 && first > 0 {
		p.add(item("dataplane.tcp_ports", i), fmt.Sprintf("%d is in dataplane.tcp_port_range, too", d.TCPPorts[i]), "remove it from the list")
	}
	if len(d.UDPPorts)+len(d.TCPPorts) == 0 && c.Role == fare.RoleServer && !p.broken["dataplane.tcp_ports"] {
		p.add("dataplane.udp_ports", "is empty, and dataplane.tcp_ports is empty too: no packets would be steered",
			"write the queue pairs' UDP port, such as 4791 of RoCEv2; if queue pairs are TCP connections, write their port under tcp_ports, such as 4793")
	}

	socket := true
	if api.Socket != "" {
		socket = p.socket("api.socket", api.Socket, "/run/fared/fared.sock")
		if "unix:"+api.Socket == d.Address {
			p.add("api.socket", api.Socket+" is dataplane.address too", "give each service a separate socket")
		}
	}
	if ro := api.ReadOnlySocket; ro != "" && ro != NoSocket && (socket || ro != ReadOnlySocketOf(api.Socket)) {
		p.socket("api.read_only_socket", ro, "/run/fared/fared-ro.sock, or none")
		if ro == api.Socket {
			p.add("api.read_only_socket", ro+" is api.socket too", "give each socket a separate path, or write none")
		} else if "unix:"+ro == d.Address {
			p.add("api.read_only_socket", ro+" is dataplane.address too", "give each service a separate socket")
		}
	}
	p.slotTable(c, socket)
	p.drains(c, socket)
	if api.Listen == "" {
		p.unused("api.tls", api.TLS != nil, "api.listen is not set")
	} else if host, ok := p.endpoint("api.listen", api.Listen, "use host:port, such as 127.0.0.1:7778"); ok && !loopbackHost(host) && api.TLS == nil {
		p.add("api.tls", "is missing, but "+api.Listen+" is not a loopback", "write cert_file, key_file and client_ca_file")
	}
	if api.TLS != nil {
		for i, name := range api.TLS.Operators {
			if err := tlsfiles.CheckName(name); err != nil {
				wrong, remedy, _ := strings.Cut(err.Error(), ": ")
				p.add(item("api.tls.operators", i), wrong, remedy)
			}
		}
	}
	if listen := c.Metrics.Listen; listen != "" {
		if _, ok := p.endpoint("metrics.listen", listen, "use host:port, such as 127.0.0.1:9469"); ok && listen == api.Listen {
			p.add("metrics.listen", listen+" is api.listen too", "give each service a separate port")
		}
	}
	if e := c.Traces.Endpoint; e != "" {
		if u, err := url.Parse(e); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil {
			p.add("traces.endpoint", model.Show(e)+" is not the URL of a collector", "use one such as http://127.0.0.1:4318/v1/traces")
		}
	}
	if listen := c.UI.Listen; listen != "" {
		host, ok := p.endpoint("ui.listen", listen, "use host:port, such as 127.0.0.1:9470")
		switch {
		case ok && !loopbackHost(host):
			p.add("ui.listen", listen+" is not a loopback, and the page has no access control", "use 127.0.0.1, and from another machine ssh -L")
		case ok && (listen == api.Listen || listen == c.Metrics.Listen):
			p.add("ui.listen", listen+" is another service's address too", "give each service a separate port")
		}
	}
}

func (p *problems) unused(path string, set bool, why string) {
	if set {
		p.add(path, "is set, but "+why, "remove it")
	}
}

// slotTable checks the path of the slot table. A derived path is as good as that of the socket.
func (p *problems) slotTable(c *Config, socket bool) {
	if mode := c.SlotTable.Mode; mode&0o022 != 0 {
		p.add("slots.mode", fmt.Sprintf("%04o lets group or others write", mode), fmt.Sprintf("use \"%04o\"", mode&^0o022))
	}
	var services []wecmp.Service
	for i, text := range c.SlotTable.Services {
		switch service, err := ParseService(text); {
		case err != nil:
			p.add(item("slots.services", i), err.Error(), "write one such as udp/4791 or tcp/4793")
		case slices.Contains(services, service):
			p.add(item("slots.services", i), text+" is listed twice", "list it once")
		case c.Role == fare.RoleServer && !c.Dataplane.steers(service):
			p.add(item("slots.services", i), text+" is not steered", fmt.Sprintf("add %d to dataplane.%s_ports, or remove it here", service.Port, text[:3]))
		default:
			services = append(services, service)
		}
	}
	switch file := c.SlotTable.File; {
	case file == "" || file == NoSlotTable, !socket && file == SlotTableOf(c.API.Socket):
	case c.Role == fare.RoleLeaf:
		p.add("slots.file", file+" is set, but no queue pair begins at a leaf", "remove it")
	case !filepath.IsAbs(file):
		p.add("slots.file", model.Show(file)+" is not an absolute path", "use one such as "+DefaultSlotTable+", or none")
	case file == c.API.Socket || file == c.API.ReadOnlySocket:
		p.add("slots.file", file+" is a socket of api too", "give the slot table a separate path, or write none")
	}
}

// drains checks the path of the drains. A derived path is as good as that of the socket.
func (p *problems) drains(c *Config, socket bool) {
	switch file := c.Drains.File; {
	case file == "" || file == NoDrains, !socket && file == DrainsOf(c.API.Socket):
	case !filepath.IsAbs(file):
		p.add("drains.file", model.Show(file)+" is not an absolute path", "use one such as /var/lib/fared/drains, or none")
	case file == c.API.Socket || file == c.API.ReadOnlySocket:
		p.add("drains.file", file+" is a socket of api too", "give the drains a separate path, or write none")
	case file == c.SlotTable.File, file == FormerSlotTable && c.SlotTable.File == DefaultSlotTable: // the latter becomes a link
		p.add("drains.file", file+" is slots.file too", "give the drains a separate path, or write none")
	}
}

// socket checks the path of a unix socket: sun_path has 108 bytes including its final zero (unix(7)).
func (p *problems) socket(path, name, such string) bool {
	switch {
	case !filepath.IsAbs(name):
		p.add(path, model.Show(name)+" is not an absolute path", "use one such as "+such)
	case len(name) > 107:
		p.add(path, fmt.Sprintf("the path has %d bytes", len(name)), "use at most 107, the limit of unix sockets")
	default:
		return true
	}
	return false
}

// endpoint splits host:port. The port is 1 to 65535.
func (p *problems) endpoint(path, text, right string) (host string, ok bool) {
	i := strings.LastIndexByte(text, ':')
	if i < 0 {
		p.add(path, model.Show(text)+" has no port", right)
		return "", false
	}
	host, digits := text[:i], text[i+1:]
	port, err := strconv.ParseUint(digits, 10, 16)
	if err != nil || port == 0 || digits[0] == '0' {
		p.add(path, model.Show(digits)+" is not a TCP port", right)
		return "", false
	}
	bare, bracketed := strings.CutPrefix(host, "[")
	if bracketed {
		inside, closed := strings.CutSuffix(bare, "]")
		if a, err := netip.ParseAddr(inside); !closed || err != nil || !a.Is6() {
			p.add(path, model.Show(host)+" is not an IPv6 address in brackets", right)
			return "", false
		}
		return inside, true
	}
	if strings.ContainsAny(host, ":/[]@ ") {
		p.add(path, model.Show(host)+" is not a host", right+"; write an IPv6 address in brackets")
		return "", false
	}
	return host, true
}

// loopbackHost reports whether a host can only be this machine. A name can refer to any machine, except for localhost
// (RFC 6761, Section 6.3).
func loopbackHost(host string) bool {
	a, err := netip.ParseAddr(host)
	return err == nil && a.Unmap().IsLoopback() || host == "localhost"
}
