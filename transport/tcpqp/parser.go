package tcpqp

const (
	// bufferSize is the size of reads that do not go directly to memory, in bytes.
	bufferSize = 64 << 10
	// directMin is the amount of missing data from which a direct read to memory costs less than a copy, in bytes.
	directMin = 8 << 10
)

// sink receives the frames of a parser.
type sink interface {
	// begin handles a frame's header. An error ends the stream.
	begin(h *header) error
	// place returns the destination of the last left bytes of the frame's data, with that length; nil drops them.
	place(left int) []byte
	// end reports the end of the frame.
	end() error
}

// parser cuts a stream into frames. If much of a frame's data is missing, it reads the data directly to its
// destination.
type parser struct {
	buf    []byte // has bufferSize bytes
	r, w   int    // buf[r:w] has been read and not parsed
	h      header
	left   int    // missing bytes of the frame's data
	direct []byte // latest first result of want
}

// want returns the destination of the next bytes: first a, which may be empty, then b.
func (p *parser) want(s sink) (a, b []byte) {
	if p.r == p.w {
		p.r, p.w = 0, 0
	} else if p.r > 0 {
		p.w = copy(p.buf, p.buf[p.r:p.w]) // less than a header
		p.r = 0
	}
	p.direct = nil
	if p.left >= directMin {
		p.direct = s.place(p.left)
	}
	return p.direct, p.buf[p.w:]
}

// got handles n bytes that have been read to the memory from want.
func (p *parser) got(n int, s sink) error {
	if d := min(n, len(p.direct)); d > 0 {
		n -= d
		if p.left -= d; p.left == 0 {
			if err := s.end(); err != nil {
				return err
			}
		}
	}
	p.direct = nil
	p.w += n
	for p.r < p.w {
		if p.left > 0 {
			k := min(p.left, p.w-p.r)
			if to := s.place(p.left); to != nil {
				copy(to, p.buf[p.r:p.r+k])
			}
			p.r += k
			p.left -= k
		} else {
			k, err := p.h.parse(p.buf[p.r:p.w])
			if err != nil {
				return err
			}
			if k == 0 {
				return nil
			}
			p.r += k
			if err := s.begin(&p.h); err != nil {
				return err
			}
			p.left = p.h.data()
		}
		if p.left == 0 {
			if err := s.end(); err != nil {
				return err
			}
		}
	}
	return nil
}
