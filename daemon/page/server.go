package page

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"html"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/netutil"
)

const (
	// maxConnections bounds the open connections; further ones wait in the kernel's queue. maxStreams bounds the open
	// pages.
	maxConnections = 96
	maxStreams     = 64
	// maxHeaderBytes bounds a request, which has no body.
	maxHeaderBytes = 16 << 10
)

//go:embed assets
var assets embed.FS

// Config describes a page.
type Config struct {
	// Title is the title of the page.
	Title string
	// Nodes are the nodes to choose from, at least one; the first is shown at first.
	Nodes []Node
	// Section is HTML that comes before the sections of a node; Scripts and Styles are the names of further files for
	// it, which the caller's handler serves. All are the program's own text.
	Section         string
	Scripts, Styles []string
}

// Server serves a page.
type Server struct {
	Streams
	nodes []*node
	index string
}

// New returns the server of a page.
func New(c Config) (*Server, error) {
	if len(c.Nodes) == 0 {
		return nil, errors.New("page: Nodes is empty")
	}
	s := &Server{}
	var options strings.Builder
	for _, n := range c.Nodes {
		s.nodes = append(s.nodes, &node{Node: n})
		fmt.Fprintf(&options, "<option>%s</option>", html.EscapeString(n.Name))
	}
	text, err := assets.ReadFile("assets/index.html")
	var head strings.Builder
	for _, name := range c.Styles {
		fmt.Fprintf(&head, "<link rel=\"stylesheet\" href=\"%s\">\n", name)
	}
	for _, name := range c.Scripts { // after page.js, as deferred scripts run in order
		fmt.Fprintf(&head, "<script defer src=\"%s\"></script>\n", name)
	}
	s.index = strings.NewReplacer("{{title}}", html.EscapeString(c.Title), "{{nodes}}", options.String(), "{{head}}", head.String(), "{{section}}", c.Section).Replace(string(text))
	return s, err
}

// node returns the node that a request names, the first one without a name, or nil.
func (s *Server) node(r *http.Request) *node {
	name := r.URL.Query().Get("node")
	if name == "" {
		return s.nodes[0]
	}
	for _, n := range s.nodes {
		if n.Name == name {
			return n
		}
	}
	return nil
}

// Handler returns the handler of all read requests, without the checks of Guard.
func (s *Server) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		_, _ = w.Write([]byte(s.index)) // a failed write ends the connection
	})
	Files(mux, assets, "core.js", "page.js", "page.css", "icon.svg")
	mux.HandleFunc("GET /events", s.stream)
	mux.HandleFunc("GET /explain", s.explain)
	return mux
}

// Files serves files of the folder assets.
func Files(mux *http.ServeMux, assets embed.FS, names ...string) {
	files, _ := fs.Sub(assets, "assets") // a constant path
	for _, name := range names {
		mux.HandleFunc("GET /"+name, func(w http.ResponseWriter, r *http.Request) { http.ServeFileFS(w, r, files, name) })
	}
}

// Common serves the files that all pages share: core.js, page.css and icon.svg.
func Common(mux *http.ServeMux) { Files(mux, assets, "core.js", "page.css", "icon.svg") }

// policy forbids every source but this server, and frames.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; " +
	"frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"

// Guard sets the headers that keep other pages out, and rejects requests to other names than this machine's: the
// browser of a victim sends the name under which a foreign page was loaded.
func Guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Cache-Control", "no-store")
		if !local(r.Host) {
			http.Error(w, "the page answers only at 127.0.0.1, [::1] and localhost: from another machine, forward a port with ssh -L", http.StatusMisdirectedRequest)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// local reports whether the Host of a request is a loopback address or localhost.
func local(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	a, err := netip.ParseAddr(host)
	return err == nil && a.IsLoopback() || strings.EqualFold(host, "localhost")
}

// Listen binds a TCP address, host:port. The bound address must be a loopback address: the page has no access control.
func Listen(address string) (net.Listener, error) {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, err
	}
	if a, ok := l.Addr().(*net.TCPAddr); !ok || !a.IP.IsLoopback() {
		return nil, errors.Join(fmt.Errorf("%s is reachable from other hosts: use 127.0.0.1, and ssh -L from another machine", address), l.Close())
	}
	return netutil.LimitListener(l, maxConnections), nil
}

// Serve is the function Serve, and ends the nodes.
func (s *Server) Serve(ctx context.Context, l net.Listener, handler http.Handler) error {
	err := Serve(ctx, l, handler)
	for _, n := range s.nodes {
		n.end()
	}
	return err
}

// Serve answers requests on l by handler, behind Guard, until ctx ends, which is not an error. It returns after every
// request and every goroutine of the page has ended. It may be called once.
func Serve(ctx context.Context, l net.Listener, handler http.Handler) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var running sync.WaitGroup
	var mu sync.Mutex // orders the last handler's begin before the wait
	ended := false
	counted := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		if ended {
			mu.Unlock()
			return
		}
		running.Add(1)
		mu.Unlock()
		defer running.Done()
		handler.ServeHTTP(w, r)
	})
	h := &http.Server{
		Handler: Guard(counted), ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, WriteTimeout: writeTimeout, IdleTimeout: 30 * time.Second,
		MaxHeaderBytes: maxHeaderBytes, BaseContext: func(net.Listener) context.Context { return ctx },
	}
	defer context.AfterFunc(ctx, func() { h.Close() })()
	err := h.Serve(l)
	cancel()
	mu.Lock()
	ended = true
	mu.Unlock()
	running.Wait()
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return fmt.Errorf("page: %w", err)
}
