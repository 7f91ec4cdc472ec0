"""What a model partitioned over several ranks needs beside what one rank does."""
