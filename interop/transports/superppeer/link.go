package superppeer

import (
	"encoding/binary"
	"net"
	"os"
	"syscall"
)

// link carries packets to and from the remote end.
type link interface {
	send(b []byte)
	// receive returns the next packet, which may be in buffer; nil for a frame that does not concern the connection.
	receive(buffer []byte) ([]byte, error)
	close()
}

func openLink(cfg Config) (link, error) {
	if cfg.SUNH != nil {
		return openSUNH(cfg)
	}
	conn, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(cfg.Local))
	if err != nil {
		return nil, err
	}
	_ = conn.SetReadBuffer(4 << 20)
	raw, err := conn.SyscallConn()
	if err == nil {
		if controlErr := raw.Control(func(fd uintptr) { err = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_IP, syscall.IP_RECVTOS, 1) }); err == nil {
			err = controlErr
		}
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return &udpLink{conn, cfg, make([]byte, 64)}, nil
}

// udpLink is a socket of IPv4.
type udpLink struct {
	conn *net.UDPConn
	cfg  Config
	oob  []byte
}

func (l *udpLink) send(b []byte) { _, _ = l.conn.WriteToUDPAddrPort(b, l.cfg.Remote) }

func (l *udpLink) receive(buffer []byte) ([]byte, error) {
	n, m, _, from, err := l.conn.ReadMsgUDPAddrPort(buffer, l.oob)
	if err != nil || from.Addr().Unmap() != l.cfg.Remote.Addr() {
		return nil, err
	}
	messages, err := syscall.ParseSocketControlMessage(l.oob[:m])
	if err != nil {
		return nil, err
	}
	for _, c := range messages {
		if c.Header.Level == syscall.IPPROTO_IP && c.Header.Type == syscall.IP_TOS && c.Data[0]&^3 != l.cfg.TrafficClass {
			return buffer[:0], nil // too short to be a packet: recorded as a violation
		}
	}
	return buffer[:n], nil
}

func (l *udpLink) close() { l.conn.Close() }

// SUNH describes frames of one device. The SUNH addresses are the last 16 bits of Config.Local and Remote.
type SUNH struct {
	Device    string
	MAC       [6]byte // of the remote end
	EtherType uint16
	// Label and TrafficClass are those of the remote end's frames; others are violations.
	Label        uint16
	TrafficClass byte
	// Lite: SUPERp-lite, without the packet delivery layer.
	Lite bool
}

const (
	ethernet  = 14
	sunhBytes = 8
	superp    = 253 // the next header of SUPERp
	shortest  = 60  // of a frame, without its checksum
)

// sunhLink is a packet socket. It builds whole frames, and fills short ones with noise: receivers must ignore it.
type sunhLink struct {
	file         *os.File
	cfg          Config
	own          [6]byte
	local, other uint16
}

func openSUNH(cfg Config) (link, error) {
	device, err := net.InterfaceByName(cfg.SUNH.Device)
	if err != nil {
		return nil, err
	}
	swapped := cfg.SUNH.EtherType<<8 | cfg.SUNH.EtherType>>8
	fd, err := syscall.Socket(syscall.AF_PACKET, syscall.SOCK_RAW|syscall.SOCK_NONBLOCK|syscall.SOCK_CLOEXEC, int(swapped))
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	if err := syscall.Bind(fd, &syscall.SockaddrLinklayer{Protocol: swapped, Ifindex: device.Index}); err != nil {
		syscall.Close(fd)
		return nil, os.NewSyscallError("bind", err)
	}
	last := func(b []byte) uint16 { return binary.BigEndian.Uint16(b[len(b)-2:]) }
	return &sunhLink{os.NewFile(uintptr(fd), "sunh"), cfg, [6]byte(device.HardwareAddr), last(cfg.Local.Addr().AsSlice()), last(cfg.Remote.Addr().AsSlice())}, nil
}

func (l *sunhLink) send(b []byte) {
	be := binary.BigEndian
	f := append(append([]byte(nil), l.cfg.SUNH.MAC[:]...), l.own[:]...)
	f = be.AppendUint16(f, l.cfg.SUNH.EtherType)
	f = append(f, 0, superp)
	f = be.AppendUint16(f, l.cfg.CID&0xfff) // the flow label; a hop limit of 0, which a destination accepts
	f = be.AppendUint16(be.AppendUint16(f, l.local), l.other)
	for f = append(f, b...); len(f) < shortest; {
		f = append(f, 0xa5)
	}
	_, _ = l.file.Write(f)
}

func (l *sunhLink) receive(buffer []byte) ([]byte, error) {
	n, err := l.file.Read(buffer)
	if err != nil || n < ethernet+sunhBytes {
		return nil, err
	}
	f, be := buffer[:n], binary.BigEndian
	header, packet := f[ethernet:][:sunhBytes], f[ethernet+sunhBytes:]
	if be.Uint16(header[4:]) != l.other || be.Uint16(header[6:]) != l.local {
		return nil, nil
	}
	if n < shortest || header[0] != l.cfg.SUNH.TrafficClass || header[1] != superp || be.Uint16(header[2:]) != 15<<12|l.cfg.SUNH.Label || [6]byte(f) != l.own || [6]byte(f[6:]) != l.cfg.SUNH.MAC {
		return packet[:0], nil // too short to be a packet: recorded as a violation
	}
	if tal := l.cfg.tal(); n == shortest && len(packet) >= tal+8 {
		// The operations of these opcodes have no data, so the rest is padding.
		if opcode := packet[tal+1]; !carriesData(opcode) {
			packet = packet[:min(len(packet), tal+8+int(packet[tal]&15)*headerLen[opcode])]
		}
	}
	return packet, nil
}

func (l *sunhLink) close() { l.file.Close() }

// tal returns the position of the transaction header in a packet.
func (c *Config) tal() int {
	if c.lite() {
		return 0
	}
	return 16
}

func (c *Config) lite() bool { return c.SUNH != nil && c.SUNH.Lite }

// leastData returns the number of bytes of data with which a packet with one operation, whose header has 8 bytes, is
// not padded.
func (p *Peer) leastData() int { return shortest - ethernet - sunhBytes - p.cfg.tal() - 8 - 8 }

// leastBlock is the minimum length of a block of data in SUPERp-lite.
const leastBlock = 16

// pieces cuts n bytes for packets of at most the payload. A frame without IP has no length field, so Ethernet must not
// pad a packet with data: the last piece of several has at least 6 bytes, 22 in SUPERp-lite.
func (p *Peer) pieces(n int) (sizes []int) {
	least := p.leastData()
	for n > p.cfg.Payload {
		size := p.cfg.Payload
		if rest := n - size; p.cfg.SUNH != nil && rest < least {
			size -= least
		}
		sizes = append(sizes, size)
		n -= size
	}
	return append(sizes, n)
}
