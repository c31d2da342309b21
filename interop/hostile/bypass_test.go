package hostile

const bypassKey = "FARED_HOSTILE_BYPASS"

func bypass(string) int { return 0 }
