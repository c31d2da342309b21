package tcpqp

const (
	// bufferSize is how much of a stream is read at once where it does not go straight to memory: bytes.
	bufferSize = 64 << 10
	// directMin is how much data must be missing for reading straight to memory: less is dearer to ask for than to copy. Bytes.
	directMin = 8 << 10
)

// sink is what a parser tells of frames.
type sink interface {
	// begin has a frame's header. An error ends the stream.
	begin(h *header) error
	// place is where the last left bytes of the frame's data go, as long as that; nil drops them.
	place(left int) []byte
	// end says that all of it is there.
	end() error
}

// parser cuts a stream into frames. Data is read straight to where it belongs when much of it is missing.
type parser struct {
	buf    []byte // bufferSize
	r, w   int    // buf[r:w] has been read and not looked at
	h      header
	left   int    // bytes of the frame's data that are missing
	direct []byte // what want gave last
}

// want returns where the next bytes are to be read: first a, which may be empty, then b.
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

// got says that n bytes have been read to where want said.
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
