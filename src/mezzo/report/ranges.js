// What a script adds to the section about ranges.
