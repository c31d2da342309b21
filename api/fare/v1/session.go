package farev1

// Established reports whether the session is established, with or without a drain.
func (s *Session) Established() bool {
	return s.GetState() == "established" || s.GetState() == "draining" || s.GetState() == "drained"
}

// PresentReason returns what is wrong with the session now, "" if nothing is known: the reason why it is not
// established, or the fault of an established one, whose reason is that of an earlier end.
func (s *Session) PresentReason() string {
	if s.Established() {
		return s.GetFault()
	}
	return s.GetReason()
}
