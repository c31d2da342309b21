package config

import (
	"bytes"
	"regexp"
	"slices"
	"strings"
)

// The parts of a line that locate examines.
var (
	comment  = regexp.MustCompile(`(^|\s)#.*$`)
	keyValue = regexp.MustCompile(`^[^\s:{\["'][^\s:]*:(\s+(.*))?$`)
)

// locate returns the line of the first mistake in text that the YAML parser rejects, or 0 if it finds none. The parser
// itself reports the place where it detected the mistake, or the begin of the surrounding block. Configuration files
// have no block scalars and no flow collections over several lines unless the parser accepts them, so locate examines
// each line separately: for unclosed quotes and brackets, a value without a key, an indentation that fits no line
// above.
func locate(data []byte) (line int, wrong string) {
	line, wrong = firstMistake(data)
	if strings.Contains(wrong, "indent") {
		if odd := oddIndentation(data); odd > 0 {
			return odd, "the line is indented by an odd number of spaces, unlike all others"
		}
	}
	return line, wrong
}

// oddIndentation returns the only line with content that is indented by an odd number of spaces, or 0 if there is none
// or several. A line that was shifted by one space sometimes causes an error only further down.
func oddIndentation(data []byte) (odd int) {
	line := 0
	for raw := range bytes.Lines(data) {
		line++
		body := strings.TrimLeft(string(raw), " ")
		if strings.TrimSpace(body) == "" || body[0] == '#' || (len(raw)-len(body))%2 == 0 {
			continue
		}
		if odd > 0 {
			return 0
		}
		odd = line
	}
	return odd
}

func firstMistake(data []byte) (line int, wrong string) {
	levels := []int{0} // indentations of the open blocks
	deeper := false    // the previous line opens a block
	bare := 0          // the previous line, if it is an item without a key
	for raw := range bytes.Lines(data) {
		line++
		text := strings.TrimRight(comment.ReplaceAllString(strings.TrimRight(string(raw), "\r\n"), ""), " ")
		body := strings.TrimLeft(text, " ")
		if body == "" {
			continue
		}
		indent := len(text) - len(body)
		switch last := levels[len(levels)-1]; {
		case indent > last && !deeper && bare > 0:
			return bare, "the item has no key with a colon and a space, but keys follow on the next line"
		case indent > last && !deeper:
			return line, "the line is indented further than the one before, which opens no block"
		case indent > last:
			levels = append(levels, indent)
		case indent < last:
			at := slices.Index(levels, indent)
			if at < 0 {
				return line, "the indentation matches no line above"
			}
			levels = levels[:at+1]
		}
		for strings.HasPrefix(body, "- ") { // an item: the part after the dash is a separate block
			rest := strings.TrimLeft(body[2:], " ")
			indent += len(body) - len(rest)
			body = rest
			if keyValue.MatchString(body) {
				levels = append(levels, indent)
			}
			deeper = false
			if !keyValue.MatchString(body) {
				break
			}
		}
		item := !keyValue.MatchString(body) && strings.HasPrefix(strings.TrimLeft(text, " "), "- ")
		bare = 0
		if item {
			bare = line
		}
		value := body
		if m := keyValue.FindStringSubmatch(body); m != nil {
			value = m[2]
		} else if !item {
			return line, "the line is neither a key with a colon and a space nor a list item"
		}
		if !closed(value) {
			return line, "a quote or bracket is not closed, or is closed twice"
		}
		deeper = value == ""
	}
	return 0, ""
}

// closed reports whether the quotes and brackets of a value are balanced.
func closed(value string) bool {
	var open []byte
	quote := byte(0)
	for i := 0; i < len(value); i++ {
		c := value[i]
		switch {
		case quote != 0:
			if c == quote {
				quote = 0
			}
		case c == '"' || c == '\'':
			quote = c
		case c == '[' || c == '{':
			open = append(open, c+2) // the closing one in ASCII
		case c == ']' || c == '}':
			if len(open) == 0 || open[len(open)-1] != c {
				return false
			}
			open = open[:len(open)-1]
		}
	}
	return quote == 0 && len(open) == 0
}
