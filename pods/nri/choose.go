package nri

import (
	"fmt"
	"strings"

	"github.com/containerd/nri/pkg/api"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/netns"
	"github.com/fared/fared/internal/rtnl"
	"github.com/fared/fared/pods"
)

const (
	// AttachAnnotation is "true" to attach a pod, and "false" to leave it alone. Without it a pod is attached that has
	// a hardware device with a sub-port.
	AttachAnnotation = "fared.io/attach"
	// SubPortsAnnotation names the sub-ports of a pod's devices where names do not: rail0=eth0,rail1=eth1. Only these
	// devices are attached.
	SubPortsAnnotation = "fared.io/sub-ports"
)

// chooser decides which pods are attached.
type chooser struct {
	// hardware returns the devices of a network namespace.
	hardware func(path string) ([]rtnl.Hardware, error)
}

func readHardware(path string) (all []rtnl.Hardware, err error) {
	err = netns.In(path, func() error {
		conn, err := rtnl.Dial()
		if err != nil {
			return err
		}
		defer conn.Close()
		all, err = conn.Hardware()
		return err
	})
	return all, err
}

// choose returns the attachment of a pod, nil if it is to be left alone, and whether its annotations want it.
func (c chooser) choose(p *api.PodSandbox) (req *farev1.AttachRequest, wanted bool, err error) {
	path := namespace(p)
	if path == "" {
		return nil, false, nil
	}
	devices, err := subPorts(p.GetAnnotations()[SubPortsAnnotation])
	if err != nil {
		return nil, true, err
	}
	req = &farev1.AttachRequest{Id: attachmentID(p), Namespace: &farev1.AttachRequest_NetnsPath{NetnsPath: path}, Devices: devices}
	switch value := p.GetAnnotations()[AttachAnnotation]; {
	case value == "false":
		return nil, false, nil
	case value == "true" || value == "" && len(devices) > 0:
		return req, true, nil
	case value != "":
		return nil, true, fmt.Errorf("annotation %s is %q: use true or false", AttachAnnotation, value)
	}
	all, err := c.hardware(path)
	if err != nil {
		return nil, false, fmt.Errorf("read the pod's devices: %w", err)
	}
	for _, h := range all {
		if h.Bus != "" {
			return req, false, nil
		}
	}
	return nil, false, nil
}

// subPorts parses SubPortsAnnotation.
func subPorts(text string) (devices []*farev1.AttachDevice, err error) {
	for _, pair := range strings.FieldsFunc(text, func(r rune) bool { return r == ',' || r == ' ' }) {
		device, subPort, ok := strings.Cut(pair, "=")
		if !ok || device == "" || subPort == "" {
			return nil, fmt.Errorf("annotation %s has %q: write DEVICE=SUBPORT, separated by commas, such as rail0=eth0,rail1=eth1", SubPortsAnnotation, pair)
		}
		devices = append(devices, &farev1.AttachDevice{Device: device, SubPort: subPort})
	}
	return devices, nil
}

// namespace returns the path of a pod's network namespace, "" for one with that of the host.
func namespace(p *api.PodSandbox) string {
	for _, n := range p.GetLinux().GetNamespaces() {
		if n.GetType() == "network" {
			return n.GetPath()
		}
	}
	return ""
}

func attachmentID(p *api.PodSandbox) string { return pods.ID(p.GetUid(), p.GetId()) }
