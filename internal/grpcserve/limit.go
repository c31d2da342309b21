package grpcserve

import (
	"net"
	"sync"
	"syscall"
)

// Limit returns l with at most MaxConnections open connections, MaxClientConnections of each client. Further ones wait
// in the kernel's queue, and use no descriptor; those of a client that has its share are closed, so that they do not
// wait before others.
func Limit(l net.Listener) net.Listener {
	return &limitedListener{Listener: l, free: make(chan struct{}, MaxConnections), closed: make(chan struct{})}
}

type limitedListener struct {
	net.Listener
	free   chan struct{} // contains an element for each open connection
	closed chan struct{}
	once   sync.Once
	shares Clients
}

// Accept implements net.Listener.
func (l *limitedListener) Accept() (net.Conn, error) {
	select {
	case l.free <- struct{}{}:
	case <-l.closed:
		return nil, net.ErrClosed
	}
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			<-l.free
			return nil, err
		}
		if release, ok := l.shares.Take(clientOf(conn), MaxClientConnections); ok {
			return &limitedConn{Conn: conn, release: sync.OnceFunc(func() { release(); <-l.free })}, nil
		}
		conn.Close()
	}
}

// Close implements net.Listener.
func (l *limitedListener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return l.Listener.Close()
}

// limitedConn is a connection of a limitedListener.
type limitedConn struct {
	net.Conn
	release func()
}

// SyscallConn implements syscall.Conn, for the credentials of a unix socket's peer.
func (c *limitedConn) SyscallConn() (syscall.RawConn, error) {
	return c.Conn.(syscall.Conn).SyscallConn()
}

// Close implements net.Conn.
func (c *limitedConn) Close() error {
	defer c.release()
	return c.Conn.Close()
}
