package pods

import (
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// DefaultSocket is the agent's socket in systemd/fared-dataplane.service.
const DefaultSocket = "/run/fared-dataplane/dataplane.sock"

// Folder returns the directory of the records of an agent, next to its socket: the agent's unit keeps the directory
// across restarts, and may write there.
func Folder(socket string) string { return filepath.Join(filepath.Dir(socket), "cni") }

// Record is what a container's network plugins have asked for. A container has a plugin call for each interface, and
// one attachment for all of them.
type Record struct {
	// ID is AttachRequest.id.
	ID string `json:"id"`
	// Netns is the path of the network namespace.
	Netns string `json:"netns"`
	// Interfaces are in the order of their calls. Without any the attachment has to end.
	Interfaces []Interface `json:"interfaces"`
}

// Interface is the part of a Record that one call has asked for.
type Interface struct {
	// Network is the name of the plugin's network configuration, and IfName the value of CNI_IFNAME: the key.
	Network string `json:"network"`
	IfName  string `json:"ifname"`
	// Devices are the names in the namespace, with their sub-ports if the configuration names them.
	Devices []Device `json:"devices"`
}

// Device is a farev1.AttachDevice.
type Device struct {
	Name    string `json:"name"`
	SubPort string `json:"subPort,omitempty"`
}

// Set adds or replaces the interface with the same key.
func (r *Record) Set(i Interface) {
	if at := slices.IndexFunc(r.Interfaces, i.sameKey); at >= 0 {
		r.Interfaces[at] = i
		return
	}
	r.Interfaces = append(r.Interfaces, i)
}

// Remove removes the interface with a key, and reports whether there was one.
func (r *Record) Remove(network, ifName string) bool {
	before := len(r.Interfaces)
	r.Interfaces = slices.DeleteFunc(r.Interfaces, Interface{Network: network, IfName: ifName}.sameKey)
	return len(r.Interfaces) < before
}

func (i Interface) sameKey(other Interface) bool {
	return i.Network == other.Network && i.IfName == other.IfName
}

// Request returns the attachment of all interfaces, each device once. The agent reads the addresses of the devices.
func (r *Record) Request() *farev1.AttachRequest {
	req := &farev1.AttachRequest{Id: r.ID, Namespace: &farev1.AttachRequest_NetnsPath{NetnsPath: r.Netns}}
	for _, i := range r.Interfaces {
		for _, d := range i.Devices {
			if !slices.ContainsFunc(req.Devices, func(a *farev1.AttachDevice) bool { return a.Device == d.Name }) {
				req.Devices = append(req.Devices, &farev1.AttachDevice{Device: d.Name, SubPort: d.SubPort})
			}
		}
	}
	return req
}

var validID = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$`)

// ID returns the id of a pod's attachment: the pod's UID, which a pod can name in the mount of its slot table, or else
// the id of its sandbox.
func ID(uid, sandbox string) string {
	if validID.MatchString(uid) {
		return uid
	}
	return sandbox
}

// Argument returns a value of CNI_ARGS, "" if it is absent.
func Argument(args, key string) string {
	for pair := range strings.SplitSeq(args, ";") {
		if k, v, ok := strings.Cut(pair, "="); ok && k == key {
			return v
		}
	}
	return ""
}
