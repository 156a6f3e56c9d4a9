"""What a model gets right and wrong: every validation sample judged once, in tables, pictures and a report."""
